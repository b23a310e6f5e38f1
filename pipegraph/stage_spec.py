"""One stage as described by the user, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipegraph.backends import StageBackend, backend_of
from pipegraph.contracts import FanOut, Operator, Source
from pipegraph.errors import GraphError
from pipegraph.integers import flag, integer
from pipegraph.policies import Policy, Retry, Skip, check_policy, retry_of, skip_of

RESERVED = ("(output)", "consumer")
"""What states and profiles name beside stages."""


@dataclass(frozen=True)
class Edge:
    """Where a stage's input comes from: output ``output`` of stage ``stage``."""

    stage: str
    output: int = 0


@dataclass(frozen=True, eq=False)
class StageSpec:
    """One stage as the user described it; see :meth:`Graph.add` for the fields.

    Raises:
        GraphError: an option is wrong; the message names rule, value and remedy.
    """

    name: str
    operator: Operator | Source
    upstream: tuple[Edge, ...]
    workers: int = 1
    backend: StageBackend | None = None
    """None leaves it to the plan."""
    capacity: int | None = None
    max_bytes: int | None = None
    ordered: bool = True
    on_error: Policy = "raise"
    timeout: float | None = None
    parameters: Mapping[str, str] | None = None
    """Of an operator without a ``config()``, as it was placed: what workers do to it later is no parameter."""
    tuned: tuple[str, ...] = ()
    """What was given as ``"auto"``: ``"workers"``, ``"capacity"``."""

    def __post_init__(self) -> None:
        name = self.name
        workers = integer(self.workers, f"stage {name!r}: workers", 1, "must be >= {} or 'auto'")
        object.__setattr__(self, "workers", workers)
        if self.backend is not None:
            object.__setattr__(self, "backend", backend_of(self.backend, name))
        if self.capacity is not None:
            rule = "must be >= {} item or 'auto'"
            capacity = integer(self.capacity, f"stage {name!r}: capacity", 1, rule)
            object.__setattr__(self, "capacity", capacity)
        if self.timeout is not None:
            if isinstance(self.timeout, bool | str) or not self.timeout > 0:
                raise GraphError(f"stage {name!r}: timeout must be more than 0 seconds, got {self.timeout!r}")
            if self.backend is None or self.backend.in_trainer:
                raise GraphError(
                    f'stage {name!r}: timeout= needs backend="process": nothing can end a thread'
                )
            object.__setattr__(self, "timeout", float(self.timeout))
        object.__setattr__(self, "ordered", flag(self.ordered, f"stage {name!r}: ordered"))
        check_policy(self.on_error, name)

    @property
    def outputs(self) -> int:
        """The number of outputs of a route; 0 for any other operator."""
        return self.operator.outputs if isinstance(self.operator, FanOut) else 0

    @property
    def retry(self) -> Retry:
        """How often the stage tries an item that fails again."""
        return retry_of(self.on_error)

    @property
    def skip(self) -> Skip | None:
        """What it leaves out once retries are used up; None if a failure ends the pass."""
        return skip_of(self.on_error)
