"""Error policies of a stage: ``on_error="raise"``, ``Skip``, ``Retry``, ``Replace``.

Frozen values that say of themselves what they may do, and what takes a failed item's place. Planner, engine and
profile ask for these facts and know no policy by its class; ``engine/stage/failure_policy.py`` applies one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from pipegraph.chunk import Chunk
from pipegraph.errors import GraphError
from pipegraph.integers import amount, integer

SHARE_COUNTS_AFTER = 100
"""A budget given as a share is not judged before this many items, but at the epoch's end: 1 bad of the first 3 is no
rate, 1 bad of all 3 is."""


def budget_of(budget: int | float | None, owner: str) -> int | float | None:
    """The budget given; raises GraphError unless it is None, a count >= 0 (int) or a share of 0 to 1 (float)."""
    if budget is None or (isinstance(budget, float) and 0 <= budget <= 1):
        return budget
    rule = "must be a count (an int >= {}), a share (a float of 0 to 1) or None"
    return integer(budget, f"{owner}: budget", 0, rule)


def is_share(budget: int | float | None) -> bool:
    """Whether a budget is a share of the items, and not a number of them."""
    return isinstance(budget, float) and budget > 0


def exceeded(budget: int | float | None, failed: int, items: int) -> bool:
    """Whether ``failed`` of ``items`` (this failure included) is more than the budget allows."""
    if budget is None:
        return False
    if is_share(budget):
        return items >= SHARE_COUNTS_AFTER and failed / items > budget
    return failed > budget


class ErrorPolicy(ABC):
    """What a stage does with items that fail.

    Attributes:
        ends: whether the first failure ends the pass, without a budget or an entry in the ledger.
        drops: whether items may be missing from the output, so that its length is unknown.
        substitutes: whether something else may take a failed item's place. The stage must then be one-to-one, and
            what lies above a ``Cache`` or runs in one process with other stages must not substitute.
        neighbours: how many other samples may be read in a failed one's place.
        retries: tries after the first.
        backoff: seconds before the first retry; doubles with each one.
        budget: failures allowed, see :class:`Skip`.
        became: what happened to a failed item, for the log.
    """

    ends: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    substitutes: ClassVar[bool] = False
    became: ClassVar[str] = ""

    @property
    def neighbours(self) -> int:
        return 0

    @property
    def retries(self) -> int:
        return 0

    @property
    def backoff(self) -> float:
        return 0.0

    @property
    def budget(self) -> int | float | None:
        return None

    @property
    def last(self) -> ErrorPolicy:
        """The policy for an item whose retries have failed too."""
        return self

    @abstractmethod
    def instead(
        self, failed: Chunk, error: Exception, neighbours: Callable[[int], Iterator[Chunk]]
    ) -> Chunk | Exception | None:
        """The chunk that takes the place of ``failed``, None to leave it out, or the error with which the pass ends.

        Args:
            neighbours: ``neighbours(n)`` iterates over up to n other samples of the neighbourhood, done by this stage.
        """


class _Raise(ErrorPolicy):
    """``on_error="raise"``."""

    ends = True

    def instead(
        self, failed: Chunk, error: Exception, neighbours: Callable[[int], Iterator[Chunk]]
    ) -> Exception:
        return error


_RAISE = _Raise()


@dataclass(frozen=True)
class Skip(ErrorPolicy):
    """Leave failing items out, at most ``budget`` of them per stage, rank and epoch.

    Args:
        budget: a count (int), or a share of the stage's items (a float of at most 1), or None for no bound. A
            share is judged at each failure from the 100th item on, and again at the end of the epoch, however short
            that was; there more failures than it allows end the pass with a :class:`~pipegraph.errors.BudgetError`.

    The first item that a stage leaves out is logged, as a warning of the logger ``pipegraph``.

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
    """Put another sample of the neighbourhood in a failing one's place, so that counts never move.

    The substitute is a draw keyed by the position: first from the same window of the source's order, then from blocks
    that were not tried yet, so that one broken block stops nothing.

    Args:
        tries: substitutes tried before the original failure is raised.
        budget: as for :class:`Skip`.

    Raises:
        GraphError: ``tries`` is below 1, or ``budget`` is negative or a share above 1.
    """

    substitutes = True
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
    ) -> Chunk | Exception:
        return next(neighbours(self.tries), error)


@dataclass(frozen=True)
class Retry(ErrorPolicy):
    """Try a failing item again, then do ``then``.

    Args:
        times: tries after the first.
        backoff: seconds before the first retry; doubles with each one. A stage that stops does not wait it out.
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
                f'Retry: then must be "raise", pg.Skip(...) or pg.Replace(...), got {self.then!r}'
            )

    @property
    def retries(self) -> int:
        return self.times

    @property
    def last(self) -> ErrorPolicy:
        return policy(self.then)

    def instead(
        self, failed: Chunk, error: Exception, neighbours: Callable[[int], Iterator[Chunk]]
    ) -> Chunk | Exception | None:
        return self.last.instead(failed, error, neighbours)


Policy = str | ErrorPolicy


def check_policy(given: object, stage: str) -> None:
    """Raises GraphError for anything that is not a policy."""
    if given != "raise" and not isinstance(given, ErrorPolicy):
        raise GraphError(
            f'stage {stage!r}: on_error must be "raise", pg.Skip(budget), pg.Retry(times, backoff, then=...) '
            f"or pg.Replace(), got {given!r}"
        )


def policy(given: Policy) -> ErrorPolicy:
    """The policy that a user gave."""
    return given if isinstance(given, ErrorPolicy) else _RAISE
