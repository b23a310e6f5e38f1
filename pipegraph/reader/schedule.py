"""Which blocks a rank reads and when, the current step, and how quickly the next ones come: the decisions of a
``BlockReader``, without its threads.

Steps of consecutive epochs are counted on one axis of *ticks*. The caller passes times in, and holds a lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from pipegraph.order.layout import Int64Array
from pipegraph.reader.prefetch_policy import RecentDurations

DRAWN_AT_ONCE: Final = 4096
"""Steps whose blocks are found in one draw of the order, and which are always known ahead: what they read is kept."""

AHEAD: Final = 65_536
"""Steps to look ahead at most while little is measured."""

UPCOMING: Final = 2
"""Blocks not yet started that should be known of."""

FETCHERS: Final = 16
"""Most blocks being loaded at once."""


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


class Standing:
    """Time during which at least one worker waits. The caller holds a lock."""

    def __init__(self) -> None:
        self._waiting = 0
        self._since = self._total = 0.0

    def begin(self, now: float) -> None:
        """A worker begins to wait."""
        if not self._waiting:
            self._since = now
        self._waiting += 1

    def end(self, now: float) -> float | None:
        """A worker stops waiting; for the last of several at once, the seconds since the first began."""
        self._waiting -= 1
        if self._waiting:
            return None
        self._total += now - self._since
        return now - self._since

    def total(self, now: float) -> float:
        """Seconds in all, those under way included."""
        return self._total + (now - self._since if self._waiting else 0.0)


class ReadSchedule:
    """The steps of one run that are known so far, and the blocks they read.

    Args:
        stride: steps over which the pace is measured.
        now: seconds on any clock that only grows.
        steps_per_block: about how many steps lie between the first uses of two consecutive blocks.

    Attributes:
        tick, tick_at: the latest one asked for (before the first, the one before it), and when.
        scanned: ticks below this are known.
        upcoming: (first tick, number) of blocks to come, in that order.
        strides: seconds per step, of the latest strides.
        loads, transfers: of blocks, from being asked for, and from the start of the transfer, to being there.
    """

    def __init__(self, stride: int, now: float, steps_per_block: float = 1.0) -> None:
        self.strides, self.loads, self.transfers = RecentDurations(), RecentDurations(), RecentDurations()
        self._stride, self._steps_per_block = stride, steps_per_block
        self.tick, self.tick_at = -1, now
        self.scanned = 0
        self.upcoming: deque[tuple[int, int]] = deque()
        self._opens_until = 0
        self._deals: list[tuple[int, RankSteps]] = []  # (tick of step 0, deal)
        self._drawn: deque[Uses] = deque()  # the ticks of each draw that are not over yet
        self._stride_from, self._stride_at, self._stride_waited = 0, now, 0.0

    def restarted(self, now: float) -> ReadSchedule:
        """That of another run, with the measurements of this one."""
        other = ReadSchedule(self._stride, now, self._steps_per_block)
        other.strides, other.loads, other.transfers = self.strides, self.loads, self.transfers
        return other

    @property
    def pace(self) -> float | None:
        """Seconds per step, without the longest strides: a pause of training must not make blocks look less urgent."""
        return self.strides.trimmed_mean

    def at_once(self) -> int:
        """How many loads to run at the same time, beside those that workers wait for.

        One, if that keeps up: parallel loads share the bandwidth, so that the one needed first ends late. Several, if a
        transfer takes longer than a block lasts, for example because of latency.
        """
        transfer, pace = self.transfers.mean, self.pace
        if not transfer or not pace:
            return 1
        return min(FETCHERS, math.ceil(transfer / (pace * self._steps_per_block)))

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

    def in_first_stride(self, tick: int) -> bool:
        """Whether a step to come belongs to the run's first stride, of which no pace is known."""
        return self.in_cold_start and tick < self._opens_until

    def reached(self, epoch: int, step: int, now: float, waited: float) -> bool:
        """Note that a step is requested; returns whether another stride has ended and its pace was measured.

        ``waited`` are the seconds spent waiting for blocks so far, which are not training.
        """
        tick = next((base + step for base, deal in self._deals if deal.epoch == epoch), -1)
        if tick <= self.tick:
            return False
        self.tick, self.tick_at = tick, now
        while len(self._deals) > 1 and self._deals[1][0] + self._deals[1][1].start <= tick:
            del self._deals[0]
        while self._drawn and self._drawn[0].end <= tick:
            self._drawn.popleft()
        steps = tick - self._stride_from
        if steps < self._stride:
            return False
        self.strides.add(max(0.0, now - self._stride_at - (waited - self._stride_waited)) / steps)
        self._stride_from, self._stride_at, self._stride_waited = tick, now, waited
        return True

    @property
    def epoch(self) -> int | None:
        """The epoch that is being read."""
        return self._deals[0][1].epoch if self._deals else None

    def next_use(self, number: int) -> int | None:
        """The tick at which a block is read next, now or later, as far as it is known."""
        for uses in self._drawn:
            tick = uses.next_use(number, self.tick)
            if tick is not None:
                return tick
        return None

    def next_draw(self) -> Draw | None:
        """The steps to look at next, or None where enough is known."""
        ahead, pace, lead = self.scanned - max(self.tick, 0), self.pace, self.loads.lead
        # What is needed later than twice the lead is not to be started now.
        reach = max(AHEAD, 2 * lead / pace) if pace and lead is not None else AHEAD
        if ahead >= DRAWN_AT_ONCE and (len(self.upcoming) >= UPCOMING or ahead >= reach):
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
