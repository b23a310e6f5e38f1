"""Chooses the size of bundles from measured times: many rows if they are quick, one if they are slow.

One worker does a whole bundle, and its finished rows wait for the rest. So a bundle grows up to ``BUNDLE_NS`` of
measured work, doubling step by step, and shrinks after two in a row that took more than ``LONG_NS``: one may have lost
its core. A source, or a generator, of which two of ``AFTER_WAIT`` items took long hands over the next ones one by one:
it may wait for something again. Results never depend on it.
"""

from __future__ import annotations

import sys
from itertools import pairwise

from pipegraph import concurrency
from pipegraph.backends import THREAD

BUNDLE_NS = 1_000_000
"""The work that a bundle may hold: the hand-over costs 1 % of this."""

LONG_NS = 8 * BUNDLE_NS
"""A bundle that took more was too large, or one of its items had to wait. Not 2 * BUNDLE_NS, because a wait for the GIL
takes 5 ms."""

AFTER_WAIT = 256
"""Two, and not for good, because an item also takes long when its thread waits for the GIL or a core."""

LIGHT_ROW_BYTES = 32 << 10
"""Rows up to this size are packed where they are made: an extra copy costs less than keeping separate objects."""

CALL_BYTES = 1 << 10
"""Rows above this size are read batch by batch, each into memory of its own; smaller ones together, and then copied."""

BATCHES_BYTES = 1 << 20
"""Several batches are handed over together up to this size: a core still has their rows in its cache to pack."""


class Waits:
    """Whether a source, or a generator, may wait for something, so that its items are handed over one by one.

    Attributes:
        alone: that; None until an item was measured.
    """

    __slots__ = ("_left", "alone")

    def __init__(self) -> None:
        self.alone: bool | None = None
        self._left = 0

    def note(self, items: int, spent_ns: int) -> None:
        """Record how long items took."""
        waited = spent_ns > LONG_NS
        self.alone = self._left > items and (waited or self.alone is True)
        self._left = AFTER_WAIT if waited else self._left - items


class Pace:
    """The bundle size of one stage in one run. Thread-safe.

    Args:
        max_rows: maximum number of rows in a bundle.
        min_rows: rows that the stage does in one call in any case.
        size: rows of a batch, if known: a bundle then ends where a batch ends.
        batches: maximum number of such batches in a bundle.
        nbytes: maximum number of bytes in a bundle.
        cost: of a call, as a multiple of a hand-over between threads (``bundle_ms`` of its backend): these times are as
            much longer.
    """

    def __init__(
        self,
        max_rows: int,
        min_rows: int = 1,
        size: int = sys.maxsize,
        nbytes: int = THREAD.bundle_bytes,
        cost: int = 1,
        batches: int = 1,
    ) -> None:
        self._batch = size
        size *= batches
        self._cost = cost
        self.max_rows = max(1, min(max_rows, size))
        self.min_rows = min(min_rows, self.max_rows)
        self.size = size
        self.nbytes = nbytes
        self._lock = concurrency.Lock()
        self._quick = self.min_rows  # rows that took less than the limit
        self._rows = self.min_rows
        self._heaviest = 0
        self._was_long = False
        self.waits = Waits()

    def rows(self, done: int = 0) -> int:
        """Rows of the next bundle, when ``done`` rows were dealt since a batch began."""
        return 1 if self.waits.alone else min(self._rows, self.size - done % self.size)

    def groups(self, done: int, rows: int) -> list[tuple[int, int]]:
        """``(start, stop)`` of each batch in a bundle of ``rows`` rows, when ``done`` rows were dealt before it."""
        ends = range(self._batch - done % self._batch, rows, self._batch)
        return list(pairwise((0, *ends, rows)))

    def packs(self, rows: int) -> bool:
        """Whether to pack ``rows`` rows before their batch is complete."""
        return rows > 1 and (self._heaviest <= LIGHT_ROW_BYTES or rows == self.size)

    @property
    def heavy(self) -> bool:
        """Whether to copy a row costs more than its share of a call."""
        return self._heaviest > CALL_BYTES

    def note(self, rows: int, spent_ns: int, nbytes: int) -> None:
        """Record how long the stage took for a bundle."""
        quick = spent_ns < BUNDLE_NS * self._cost
        if self.max_rows == 1 or (quick and self._quick >= self.max_rows and nbytes <= rows * self._heaviest):
            return  # nothing new
        with self._lock:
            if quick:
                within = rows * BUNDLE_NS * self._cost // max(1, spent_ns)
                self._quick = max(self._quick, min(self.max_rows, 2 * rows, within))
            elif spent_ns > LONG_NS * self._cost and self._was_long:
                self._quick = min(self._quick, max(self.min_rows, rows // 4))
            self._was_long = spent_ns > LONG_NS * self._cost
            self._heaviest = max(self._heaviest, nbytes // rows)
            heaviest, batch = max(1, self._heaviest), self._batch
            rows = min(self.nbytes // heaviest, self._quick, self.max_rows)
            if rows > batch:
                rows = max(batch, min(rows, BATCHES_BYTES // heaviest) // batch * batch)
            self._rows = max(self.min_rows, rows)
