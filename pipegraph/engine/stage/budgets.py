"""The error budget of one stage in one epoch. Pure; guarded by the lock of ``ledger``.

A run that resumes from a state must count as the previous one would have. So the book also records the input cursor of
each item: it tells how many items, and which failures, lie before the cursor of the last delivery. Both are found by
bisection, so that a lookup stays cheap however many items have failed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pipegraph.chunk import Cursor, Lineage
from pipegraph.engine.stage.cursors import earlier

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


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One sample that was left out or replaced."""

    key: Any
    position: int
    epoch: int
    stage: str
    error: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A ledger entry.

    Attributes:
        ordinal: number of the item in its stage and epoch, from 1.
        number: of the entry itself; it stays the same when the item is replayed.
    """

    shown: Quarantined
    row: Lineage
    ordinal: int
    number: int


_ordinal = attrgetter("ordinal")


class Book:
    """See the module docstring.

    Args:
        failed, items: counts at the end of the previous run.
        since: no ledger entry that this book adds has a lower number.

    Attributes:
        added: the ledger entries that this book added.
    """

    __slots__ = (
        *("_came", "_entries", "_failed_before", "_ordinals", "_passed"),
        *("added", "since"),
    )

    def __init__(self, failed: int = 0, items: int = 0, since: int = 0) -> None:
        self._failed_before = failed
        self.since = since
        self.added = 0
        self._ordinals: list[int] = []  # of failed items, ascending
        self._entries: list[Entry] = []  # for their samples, in the same order
        self._came: list[tuple[Cursor, int]] = []  # (an item's cursor, how many items came in with it)
        self._passed = items  # number of items before these

    @property
    def failed(self) -> int:
        """How many items failed, including earlier runs."""
        return self._failed_before + len(self._ordinals)

    @property
    def last_failed(self) -> int:
        """The ordinal of the last item that failed, of those recorded; 0 if none did. All that are not finished come
        after those whose records were dropped."""
        return self._ordinals[-1] if self._ordinals else 0

    @property
    def items(self) -> int:
        """How many items came in, including earlier runs."""
        return self._came[-1][1] if self._came else self._passed

    def take(self, befores: Sequence[Cursor], first: int) -> None:
        """Items ``first``, ``first`` + 1, ... of the epoch came in at these cursors."""
        self._came.extend(zip(befores, range(first, first + len(befores)), strict=True))

    def add(self, ordinal: int, entries: Sequence[Entry]) -> None:
        """An item failed. Completion-order stages call this a little out of the order of ordinals."""
        insort(self._ordinals, ordinal)
        for entry in entries:
            insort(self._entries, entry, key=_ordinal)

    def passed(self, cursor: Cursor) -> int:
        """How many items came in before ``cursor``."""
        came = self._before(cursor)
        return self._came[came - 1][1] if came else self._passed

    def prune(self, cursor: Cursor, kept: int) -> None:
        """Drop the records before ``cursor`` but the last ``kept`` entries; no earlier one will be looked up."""
        came = self._before(cursor)
        if came:
            self._passed = self._came[came - 1][1]
            del self._came[:came]
            failed = bisect_right(self._ordinals, self._passed)
            self._failed_before += failed
            del self._ordinals[:failed]
            del self._entries[: max(0, bisect_right(self._entries, self._passed, key=_ordinal) - kept)]

    def _before(self, cursor: Cursor) -> int:
        return bisect_left(self._came, True, key=lambda each: not earlier(each[0], cursor))

    def failed_of(self, items: int) -> int:
        """How many of the first ``items`` items failed."""
        return self._failed_before + bisect_right(self._ordinals, items)

    def behind(self, items: int) -> int:
        """How many entries are of later items than the first ``items``."""
        return len(self._entries) - bisect_right(self._entries, items, key=_ordinal)

    def latest(self, count: int, items: int | None = None) -> list[Entry]:
        """The last ``count`` entries, of the first ``items`` items or of all."""
        end = len(self._entries) if items is None else bisect_right(self._entries, items, key=_ordinal)
        return self._entries[max(0, end - count) : end]
