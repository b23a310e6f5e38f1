"""How many rows a worker takes or makes at once: many where they are quick, one where they take long.

A bundle is done by one worker: so it should not take much longer than handing it over costs. Each stage allows
itself as many rows as it has shown to do within ``BUNDLE_NS``; it allows more step by step, and much fewer at once
where a bundle took too long. What comes out never depends on it.
"""

from __future__ import annotations

import sys
import threading
from itertools import pairwise

BUNDLE_NS = 1_000_000
"""A bundle that took less may be twice as long next time: handing it over costs 1 % of this."""

LONG_NS = 8 * BUNDLE_NS
"""One that took more was too long. Not twice, for a thread that waits for the interpreter lock waits 5 ms."""

REMOTE = 10
"""A bundle that goes to a process and back may take so many times as long: the way costs that much more."""

BUNDLE_BYTES = 1 << 20
"""Rows of so many bytes are heavy enough to be handed over alone."""


FAR, FAR_BYTES = 50, 8 * BUNDLE_BYTES
"""The same for a Ray actor: a call to one costs all that take part a millisecond or two, as writing megabytes does."""

LIGHT_ROW_BYTES = 32 << 10
"""Rows up to this size are put together where they are made: once more to copy them costs less than to keep them."""


class Pace:
    """One stage's pace in one run. Thread-safe.

    Args:
        max_rows: in a bundle.
        min_rows: that the stage does in one call in any case.
        size: rows of the batch at whose end a bundle ends, if one is known.
        batches: of how many such batches a bundle may be.
        nbytes: at most in one bundle.
        remote: whether the stage works in processes.
        far: whether the processes are a cluster's.
    """

    def __init__(
        self,
        max_rows: int,
        min_rows: int = 1,
        size: int = sys.maxsize,
        nbytes: int = BUNDLE_BYTES,
        remote: bool = False,
        far: bool = False,
        batches: int = 1,
    ) -> None:
        self._batch = size
        size *= batches
        self._times = FAR if far else REMOTE if remote else 1
        self.max_rows = max(1, min(max_rows, size))
        self.min_rows = min(min_rows, self.max_rows)
        self.size = size
        self.nbytes = min(nbytes, FAR_BYTES if far else BUNDLE_BYTES)
        self._lock = threading.Lock()
        self._quick = self.min_rows  # rows that have been quick enough
        self._rows = self.min_rows
        self._heaviest = 0

    def rows(self, done: int = 0) -> int:
        """Rows of the next bundle, when ``done`` have been dealt since a batch began."""
        return min(self._rows, self.size - done % self.size)

    def groups(self, done: int, rows: int) -> list[tuple[int, int]]:
        """From where to where each batch lies in a bundle of so many rows, when ``done`` were dealt before it."""
        ends = range(self._batch - done % self._batch, rows, self._batch)
        return list(pairwise((0, *ends, rows)))

    def packs(self, rows: int) -> bool:
        """Whether to put so many rows together before their batch is complete."""
        return rows > 1 and (self._heaviest <= LIGHT_ROW_BYTES or rows == self.size)

    def note(self, rows: int, spent_ns: int, nbytes: int) -> None:
        """The stage has done a bundle."""
        if self.max_rows == 1:
            return
        with self._lock:
            if spent_ns < BUNDLE_NS * self._times:
                if self._quick >= self.max_rows and nbytes <= rows * self._heaviest:
                    return
                self._quick = max(self._quick, min(self.max_rows, 2 * rows))
            elif spent_ns > LONG_NS * self._times:
                self._quick = min(self._quick, max(self.min_rows, rows // 4))
            self._heaviest = max(self._heaviest, nbytes // rows)
            lightest = self.nbytes // self._heaviest if self._heaviest else self.max_rows
            self._rows = max(self.min_rows, min(lightest, self._quick, self.max_rows))
