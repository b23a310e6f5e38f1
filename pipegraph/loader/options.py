"""What :meth:`pipegraph.Graph.loader` is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipegraph.integers import flag, integer
from pipegraph.loader.ranks import resolve
from pipegraph.units import parse_bytes


@dataclass
class LoaderOptions:
    """The options, checked; ``Graph.loader`` documents them."""

    epochs: int | None
    memory_limit: Any
    equal_steps: bool | None
    autotune: bool
    rank: int | None
    world_size: int | None
    mesh: Any

    def __post_init__(self) -> None:
        if self.epochs is not None:
            self.epochs = integer(self.epochs, "epochs", 1, "must be >= {} or None (endless)")
        if self.equal_steps is not None:
            self.equal_steps = flag(self.equal_steps, "equal_steps", rule="True, False or None")
        self.autotune = flag(self.autotune, "autotune")
        if self.rank is not None or self.world_size is not None:
            resolve(self.rank, self.world_size)
        if self.memory_limit is not None:
            self.memory_limit = parse_bytes(self.memory_limit, "memory_limit")

    def own(self) -> tuple[int, int]:
        """This rank and the world size, now."""
        return resolve(self.rank, self.world_size, self.mesh)
