"""The error budget of one stage in one epoch. Pure; ``ledger`` holds the lock.

A run that resumes from a state must count as the one before would have. So the book also notes at which cursor of
the stage's input each item came in: from that follows how many items, and which failures, lie before the cursor of
what was delivered. Both are found by bisection, so a look costs the same however much has failed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pipegraph.chunk import Cursor, Lineage
from pipegraph.engine.stage.cursors import earlier


@dataclass(frozen=True)
class Quarantined:
    """One sample that was left out or replaced."""

    key: Any
    position: int
    epoch: int
    stage: str
    error: str


@dataclass(frozen=True)
class Entry:
    """A ledger line.

    Attributes:
        ordinal: which item of its stage's epoch it was, counted from 1.
        number: of the line itself; replayed, it keeps the number it had.
    """

    shown: Quarantined
    row: Lineage
    ordinal: int
    number: int


_ordinal = attrgetter("ordinal")


class Book:
    """See the module docstring.

    Args:
        failed, items: what the run before this one had counted.
    """

    __slots__ = ("_came", "_entries", "_failed_before", "_ordinals", "_passed", "items_before", "new")

    def __init__(self, failed: int = 0, items: int = 0) -> None:
        self._failed_before = failed
        self.items_before = items
        self.new: list[Any] = []
        """Keys of the lines that are in the ledger because of this book."""
        self._ordinals: list[int] = []  # of the items that failed, growing
        self._entries: list[Entry] = []  # of their samples, in the same order
        self._came: list[
            tuple[Cursor, int]
        ] = []  # the cursors at which items came in, and how many those make
        self._passed = items  # how many came in before those

    @property
    def failed(self) -> int:
        """How many items failed, of earlier runs too."""
        return self._failed_before + len(self._ordinals)

    @property
    def last_failed(self) -> int:
        """The ordinal of the last item that failed in this run, or 0."""
        return self._ordinals[-1] if self._ordinals else 0

    @property
    def items(self) -> int:
        """How many items came in, in earlier runs too."""
        return self._came[-1][1] if self._came else self._passed

    def take(self, befores: Sequence[Cursor], first: int) -> None:
        """Items came in at these cursors; with the first of them it is ``first`` items, and one more with each."""
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

    def prune(self, cursor: Cursor) -> None:
        """Nobody will ask for a cursor before this one again."""
        came = self._before(cursor)
        if came:
            self._passed = self._came[came - 1][1]
            del self._came[:came]

    def _before(self, cursor: Cursor) -> int:
        return bisect_left(self._came, True, key=lambda each: not earlier(each[0], cursor))

    def failed_of(self, items: int) -> int:
        """How many of the first ``items`` items failed."""
        return self._failed_before + bisect_right(self._ordinals, items)

    def latest(self, count: int, items: int | None = None) -> list[Entry]:
        """The last lines, of the first ``items`` items or of all."""
        end = len(self._entries) if items is None else bisect_right(self._entries, items, key=_ordinal)
        return self._entries[max(0, end - count) : end]
