"""Which blocks a rank reads and when, and the current step: the decisions of a ``BlockReader``, without its threads.

Steps of consecutive epochs are counted on one axis of *ticks*. The caller holds a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from pipegraph.order.layout import Int64Array

SHARE: Final = 0.5
"""Of ``memory_limit``, what blocks held in memory may take; chunks in flight have the rest."""

DRAWN_AT_ONCE: Final = 4096
"""Steps whose blocks are found in one draw of the order, and which are always known ahead: what they read is kept."""

AHEAD: Final = 131_072
"""Steps to look ahead at most."""

UPCOMING: Final = 2
"""Blocks not yet started that should be known of."""

FETCHERS: Final = 16
"""Most blocks being loaded at once."""

AT_ONCE_NBYTES: Final = 256 << 20
"""Bytes of the blocks that are read ahead at the same time: loads share the bandwidth, so that of large ones the one
needed first would end late."""


@dataclass(frozen=True)
class RankSteps:
    """One epoch's steps on one rank, as a ``ShardSelect`` deals them.

    Attributes:
        start, stop: the first step that is dealt, and the steps that the epoch has left for the rank.
        blocks: the block (or whole part) that each of the steps first..last-1 reads, int64.
    """

    epoch: int
    start: int
    stop: int
    blocks: Callable[[int, int], Int64Array]


@dataclass(frozen=True, eq=False)
class Uses:
    """The blocks that a run of steps reads, each once, by their first step; int64 arrays of one length.

    Attributes:
        end: the step behind the last one.
        ticks: every step, those of one block together and in order, the blocks by their number.
        known: the blocks by their number; ``starts``: where each one's steps start in ``ticks``, and the end.
    """

    numbers: Int64Array
    first: Int64Array
    end: int
    ticks: Int64Array
    known: Int64Array
    starts: Int64Array

    @staticmethod
    def of(blocks: Int64Array, start: int) -> Uses:
        """Of the blocks that steps start, start+1 ... read."""
        grouped = np.argsort(blocks, kind="stable")
        known, begin = np.unique(blocks[grouped], return_index=True)
        starts = np.append(begin, len(blocks)).astype(np.int64)
        ticks = grouped.astype(np.int64) + start
        first = ticks[starts[:-1]]
        by_step = np.argsort(first)
        return Uses(known[by_step], first[by_step], start + len(blocks), ticks, known, starts)

    def next_use(self, number: int, step: int) -> int | None:
        """The first of these steps, from ``step`` on, that reads a block; None if none does."""
        at = int(np.searchsorted(self.known, number))
        if at == len(self.known) or self.known[at] != number:
            return None
        begin, end = int(self.starts[at]), int(self.starts[at + 1])
        place = begin + int(np.searchsorted(self.ticks[begin:end], step))
        return int(self.ticks[place]) if place < end else None


class Draw(NamedTuple):
    """Steps of a deal whose blocks are to be found next; ``base`` is the tick of its step 0."""

    base: int
    deal: RankSteps
    first: int
    last: int


class ReadSchedule:
    """The steps of one run that are known so far, and the blocks they read.

    Args:
        stride: steps after which to look again at what there is room for; so many first ones are the cold start.

    Attributes:
        tick: the latest one asked for; before the first, the one before it.
        scanned: ticks below this are known.
        upcoming: (first tick, number) of blocks to come, in that order.
    """

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self.tick = -1
        self.scanned = 0
        self.upcoming: deque[tuple[int, int]] = deque()
        self._opens_until = 0
        self._deals: list[tuple[int, RankSteps]] = []  # (tick of step 0, deal)
        self._drawn: deque[Uses] = deque()  # the ticks of each draw that are not over yet
        self._stride_from = 0

    def add(self, deal: RankSteps) -> None:
        """An epoch's steps follow those of the one before."""
        if self._deals:
            base, before = self._deals[-1]
            base += before.stop - deal.start
        else:
            base = 0
            self.scanned = self._stride_from = deal.start
            self.tick = deal.start - 1
            self._opens_until = deal.start + self._stride
        self._deals.append((base, deal))

    @property
    def in_cold_start(self) -> bool:
        """Whether the run is still in its first stride of steps."""
        return self.tick < self._opens_until

    def reached(self, epoch: int, step: int) -> bool:
        """Note that a step is requested; returns whether another stride or an epoch has ended."""
        tick = next((base + step for base, deal in self._deals if deal.epoch == epoch), -1)
        if tick <= self.tick:
            return False
        self.tick, deals = tick, len(self._deals)
        while len(self._deals) > 1 and self._deals[1][0] + self._deals[1][1].start <= tick:
            del self._deals[0]
        while self._drawn and self._drawn[0].end <= tick:
            self._drawn.popleft()
        if tick - self._stride_from < self._stride and len(self._deals) == deals:
            return False
        self._stride_from = tick
        return True

    def next_use(self, number: int) -> int | None:
        """The tick at which a block is read next, now or later, as far as it is known."""
        for uses in self._drawn:
            tick = uses.next_use(number, self.tick)
            if tick is not None:
                return tick
        return None

    def next_draw(self) -> Draw | None:
        """The steps to look at next, or None where enough is known."""
        ahead = self.scanned - max(self.tick, 0)
        if ahead >= DRAWN_AT_ONCE and (len(self.upcoming) >= UPCOMING or ahead >= AHEAD):
            return None
        for base, deal in self._deals:
            first = self.scanned - base
            if deal.start <= first < deal.stop:
                return Draw(base, deal, first, min(deal.stop, first + DRAWN_AT_ONCE))
        return None

    def merge(self, uses: Uses, scanned: int, there: Container[int]) -> None:
        """Take what was found by a draw, in ticks."""
        self.scanned = scanned
        self._drawn.append(uses)
        known = {number for _, number in self.upcoming}
        for number, first in zip(uses.numbers.tolist(), uses.first.tolist(), strict=True):
            if number not in there and number not in known:
                self.upcoming.append((first, number))

    def next_upcoming(self, there: Container[int]) -> tuple[int, int] | None:
        """The first block to come that nobody has asked for yet."""
        while self.upcoming and (self.upcoming[0][1] in there or self.upcoming[0][0] <= self.tick):
            self.upcoming.popleft()
        return self.upcoming[0] if self.upcoming else None
