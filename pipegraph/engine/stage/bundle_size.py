"""How many rows a source hands over at a time: many where they are quick, one where they take long.

A bundle holds its rows back until the last is done, and is done by one worker: so it should not take much
longer than handing it over costs. Each stage of a chain allows as many rows as it has shown to do within
``BUNDLE_NS``; it allows more step by step, and much fewer at once where a bundle took too long. What comes
out never depends on it.
"""

from __future__ import annotations

import threading

BUNDLE_NS = 1_000_000
"""A bundle that took less may be twice as long next time: handing it over costs 1 % of this."""

LONG_NS = 8 * BUNDLE_NS
"""One that took more was too long. Not twice, for a thread that waits for the interpreter lock waits 5 ms."""

AFAR = 10
"""A bundle that goes to a process and back may take so many times as long: the way costs that much more."""

BUNDLE_BYTES = 1 << 20
"""Rows of so many bytes are heavy enough to be handed over alone."""


LIGHT_ROW_BYTES = 32 << 10
"""Rows up to this size are put together where they are made: once more to copy them costs less than to keep them."""


class Pace:
    """One chain's pace in one run. Thread-safe.

    Args:
        most: rows in a bundle.
        least: rows that the source reads in one call in any case.
        size: rows of the batch at which a bundle ends.
        nbytes: at most in one bundle.
        afar: whether one of the chain's stages works in processes.
    """

    def __init__(self, most: int, least: int, size: int, nbytes: int, afar: bool = False) -> None:
        self._times = AFAR if afar else 1
        self.most = min(most, size)
        self.least = min(least, self.most)
        self.size = size
        self.nbytes = min(nbytes, BUNDLE_BYTES)
        self._lock = threading.Lock()
        self._allowed: dict[str, int] = {}
        self._rows = self.least
        self._heaviest = 0

    def admit(self, stage: str) -> None:
        """A stage whose time counts; called for each before the first bundle, whose size they all decide."""
        self._allowed[stage] = self.least

    def rows(self, done: int) -> int:
        """Rows of the next bundle, when ``done`` have been dealt since a batch began."""
        return min(self._rows, self.size - done % self.size)

    def packs(self, rows: int) -> bool:
        """Whether to put so many rows together before their batch is complete."""
        return rows > 1 and (self._heaviest <= LIGHT_ROW_BYTES or rows == self.size)

    def note(self, stage: str, rows: int, spent_ns: int, nbytes: int) -> None:
        """A stage has done a bundle."""
        with self._lock:
            allowed = self._allowed[stage]
            if spent_ns < BUNDLE_NS * self._times:
                if allowed >= self.most and nbytes <= rows * self._heaviest:
                    return
                self._allowed[stage] = max(allowed, min(self.most, 2 * rows))
            elif spent_ns > LONG_NS * self._times:
                self._allowed[stage] = min(allowed, max(self.least, rows // 4))
            self._heaviest = max(self._heaviest, nbytes // rows)
            lightest = self.nbytes // self._heaviest if self._heaviest else self.most
            self._rows = max(self.least, min(lightest, *self._allowed.values(), self.most))
