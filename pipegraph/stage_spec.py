"""One stage as described by the user, and its error policy: frozen values, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipegraph.backends import StageBackend, backend_of
from pipegraph.contracts import FanOut, Operator, Source
from pipegraph.errors import GraphError, shown
from pipegraph.integers import amount, flag, integer


@dataclass(frozen=True)
class Skip:
    """Leave failing items out, at most ``budget`` of them per stage, rank and epoch, counted from the last start.

    Args:
        budget: a count (int), or a share of the stage's items (a float of at most 1), or None for no limit. A share is
            checked at each failure from the 100th item on, and again at the end of every epoch, however short. If it is
            exceeded at the end, the pass ends with a :class:`~pipegraph.errors.BudgetError`.

    The logger ``pipegraph`` warns at the first item that a stage leaves out.

    Raises:
        GraphError: ``budget`` is negative, or a share above 1.
    """

    budget: int | float | None = None

    def __post_init__(self) -> None:
        if self.budget is None or (isinstance(self.budget, float) and 0 <= self.budget <= 1):
            return
        rule = "must be a count (an int >= {}), a share (a float of 0 to 1) or None"
        object.__setattr__(self, "budget", integer(self.budget, "Skip: budget", 0, rule))


@dataclass(frozen=True)
class Retry:
    """Try a failing item again, then do ``then``.

    Args:
        times: number of tries after the first.
        backoff: seconds before the first retry; doubles with each one. Closing the loader does not wait for it.
        then: ``"raise"`` or :class:`Skip`.

    Raises:
        GraphError: ``times`` or ``backoff`` is below 0, or ``then`` is something else.
    """

    times: int = 1
    backoff: float = 0.0
    then: str | Skip = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", integer(self.times, "Retry: times", 0))
        amount(self.backoff, "Retry: backoff (seconds)", refusal=GraphError)
        if self.then != "raise" and not isinstance(self.then, Skip):
            raise GraphError(f'Retry: then must be "raise" or pg.Skip(...), got {shown(self.then)}')


Policy = str | Skip | Retry


_ONCE = Retry(0)

RESERVED = ("(output)", "consumer")
"""What states and profiles name beside stages."""


@dataclass(frozen=True)
class Edge:
    """Where a stage's input comes from: output ``output`` of stage ``stage``."""

    stage: str
    output: int = 0


@dataclass(frozen=True, eq=False, repr=False)
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
        if self.on_error != "raise" and not isinstance(self.on_error, Skip | Retry):
            raise GraphError(
                f'stage {name!r}: on_error must be "raise", pg.Skip(budget) or pg.Retry(times, backoff, then=...), '
                f"got {shown(self.on_error)}"
            )

    @property
    def outputs(self) -> int:
        """The number of outputs of a route; 0 for any other operator."""
        return self.operator.outputs if isinstance(self.operator, FanOut) else 0

    @property
    def retry(self) -> Retry:
        """How often the stage tries an item that fails again."""
        return self.on_error if isinstance(self.on_error, Retry) else _ONCE

    @property
    def skip(self) -> Skip | None:
        """What it leaves out once retries are used up; None if a failure ends the pass."""
        last = self.on_error.then if isinstance(self.on_error, Retry) else self.on_error
        return last if isinstance(last, Skip) else None
