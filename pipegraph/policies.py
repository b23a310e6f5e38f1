"""Error policies besides ``on_error="raise"``: ``Skip``, ``Retry``, ``Replace``. Frozen values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipegraph.chunk import Chunk
from pipegraph.error_policy import ErrorPolicy as ErrorPolicy, Policy, policy
from pipegraph.errors import GraphError, shown
from pipegraph.integers import amount, integer


def budget_of(budget: int | float | None, owner: str) -> int | float | None:
    """The budget given; raises GraphError unless it is None, a count >= 0 (int) or a share of 0 to 1 (float)."""
    if budget is None or (isinstance(budget, float) and 0 <= budget <= 1):
        return budget
    rule = "must be a count (an int >= {}), a share (a float of 0 to 1) or None"
    return integer(budget, f"{owner}: budget", 0, rule)


@dataclass(frozen=True)
class Skip(ErrorPolicy):
    """Leave failing items out, at most ``budget`` of them per stage, rank and epoch.

    Args:
        budget: a count (int), or a share of the stage's items (a float of at most 1), or None for no limit. A share is
            checked at each failure from the 100th item on, and again at the end of every epoch, however short. If it is
            exceeded at the end, the pass ends with a :class:`~pipegraph.errors.BudgetError`.

    The logger ``pipegraph`` warns at the first item that a stage leaves out.

    Raises:
        GraphError: ``budget`` is negative, or a share above 1.
    """

    drops = True
    became = "was left out"
    budget: int | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", budget_of(self.budget, "Skip"))

    def instead(self, failed: Chunk, error: Exception, neighbours: Callable[[int], Iterator[Chunk]]) -> None:
        return None


@dataclass(frozen=True)
class Replace(ErrorPolicy):
    """Replace a failing sample by one of its neighbours, so that the number of samples never changes.

    The substitute depends on the position only. It comes from the same window of the source's order, then from blocks
    that were not tried yet, so that one broken block does not end the pass.

    Args:
        tries: number of substitutes to try before the original failure is raised.
        budget: as for :class:`Skip`.

    Raises:
        GraphError: ``tries`` is below 1, or ``budget`` is negative or a share above 1.
    """

    substitutes = "input"
    became = "was replaced"
    tries: int = 3
    budget: int | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tries", integer(self.tries, "Replace: tries"))
        object.__setattr__(self, "budget", budget_of(self.budget, "Replace"))

    @property
    def neighbours(self) -> int:
        return self.tries

    def instead(
        self, failed: Chunk, error: Exception, neighbours: Callable[[int], Iterator[Chunk]]
    ) -> Iterator[Chunk]:
        return neighbours(self.tries)


@dataclass(frozen=True)
class Retry(ErrorPolicy):
    """Try a failing item again, then do ``then``.

    Args:
        times: number of tries after the first.
        backoff: seconds before the first retry; doubles with each one. Closing the loader does not wait for it.
        then: ``"raise"``, :class:`Skip` or :class:`Replace`.

    Raises:
        GraphError: ``times`` or ``backoff`` is below 0, or ``then`` is something else.
    """

    times: int = 1
    backoff: float = 0.0
    then: Policy = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", integer(self.times, "Retry: times", 0))
        amount(self.backoff, "Retry: backoff (seconds)", refusal=GraphError)
        if self.then != "raise" and (not isinstance(self.then, ErrorPolicy) or isinstance(self.then, Retry)):
            raise GraphError(
                f'Retry: then must be "raise", pg.Skip(...) or pg.Replace(...), got {shown(self.then)}'
            )

    @property
    def retries(self) -> int:
        return self.times

    @property
    def last(self) -> ErrorPolicy:
        return policy(self.then)
