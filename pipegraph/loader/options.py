"""What :meth:`pipegraph.Graph.loader` is given, and the rank, world size and seed that follow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pipegraph.errors import GraphError
from pipegraph.integers import amount, flag, integer
from pipegraph.units import parse_bytes


@dataclass(eq=False, repr=False)
class LoaderOptions:
    """The options, checked; ``Graph.loader`` documents them."""

    epochs: int | None
    memory_limit: Any
    equal_steps: bool | None
    autotune: bool
    rank: int | None
    world_size: int | None
    mesh: Any
    log_every: float | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None:
            self.epochs = integer(self.epochs, "epochs", 1, "must be >= {} or None (endless)")
        if self.equal_steps is not None:
            self.equal_steps = flag(self.equal_steps, "equal_steps", rule="True, False or None")
        self.autotune = flag(self.autotune, "autotune")
        if self.log_every is not None:
            self.log_every = amount(self.log_every, "log_every (seconds)", 0, GraphError)
        if self.rank is not None or self.world_size is not None:
            resolve(self.rank, self.world_size)
        if self.memory_limit is not None:
            self.memory_limit = parse_bytes(self.memory_limit, "memory_limit")

    def own(self) -> tuple[int, int]:
        """This rank and the world size, now."""
        return resolve(self.rank, self.world_size, self.mesh)


def resolve(rank: int | None, world_size: int | None, mesh: Any = None) -> tuple[int, int]:
    """``(rank, world size)``: as given, else the mesh dimension's, the process group's, torchrun's, or 0 of 1.

    Raises:
        GraphError: only one of the two was given, or they do not fit.
    """
    if (rank is None) != (world_size is None):
        raise GraphError(f"rank and world_size go together, got rank={rank}, world_size={world_size}")
    if rank is None or world_size is None:
        rank, world_size = _found() if mesh is None else (int(mesh.get_local_rank()), int(mesh.size()))
    rank, world_size = integer(rank, "rank", 0), integer(world_size, "world_size")
    if rank >= world_size:
        raise GraphError(f"rank must be in 0..world_size-1, got rank={rank}, world_size={world_size}")
    return rank, world_size


def _found() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def agree_on_seed(seed: int | None, rank: int, world_size: int) -> int:
    """The graph's seed; for None, one that rank 0 draws and broadcasts to the process group.

    Raises:
        GraphError: there are several ranks, and no process group to agree in.
    """
    if seed is not None:
        return seed
    drawn = int.from_bytes(os.urandom(6), "little")
    if world_size == 1:
        return drawn
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise GraphError(
            f"seed=None with {world_size} ranks needs an initialised torch.distributed group to agree on one; "
            "give Graph(seed=...) a number"
        )
    shared = [drawn if rank == 0 else 0]
    dist.broadcast_object_list(shared, src=0)
    return int(shared[0])
