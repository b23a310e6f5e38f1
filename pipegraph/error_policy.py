"""The contract of error policies: facts of what one may do, and what takes a failed item's place.

Planner, engine and profile ask for these facts and know no policy by its class; ``engine/stage/failure_policy.py``
applies one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from pipegraph.chunk import Chunk
from pipegraph.errors import GraphError

SHARE_COUNTS_AFTER = 100
"""A budget given as a share is not judged before this many items, but at the epoch's end: 1 bad of the first 3 is no
rate, 1 bad of all 3 is."""


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
