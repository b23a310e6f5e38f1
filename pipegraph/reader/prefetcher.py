"""Decides when each block is fetched, from measured load times and training pace. No threads, no clock.

The caller holds a lock around everything here, and passes times in.
"""

from __future__ import annotations

import math
from typing import Any, Final

from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.block_table import BlockEntry, BlockTable
from pipegraph.reader.prefetch_policy import RecentDurations, start_in
from pipegraph.reader.schedule import Draw, ReadSchedule

FETCHERS: Final = 16
"""Most blocks being loaded at once."""


class PrefetchPlanner:
    """Where training is, how fast it runs, how long loads take, and what to load next."""

    def __init__(self, source: BlockSource, table: BlockTable, now: float) -> None:
        self._source, self._table = source, table
        self._loads = RecentDurations()  # from being asked for to being there
        self._transfers = RecentDurations()  # from the start of the transfer
        self._strides = RecentDurations()  # seconds per step, of the latest strides
        self.restart(now)

    def restart(self, now: float) -> None:
        """Another run begins; the measurements are kept."""
        self.schedule = ReadSchedule(self._source.stride, now)

    @property
    def _pace(self) -> float | None:
        """Seconds per step.

        A pause of training (an evaluation, a checkpoint) must not make blocks look less urgent than they are once it is
        over: the longest strides do not count.
        """
        return self._strides.trimmed_mean

    def reached(self, epoch: int, step: Any, now: float, waited: float) -> bool:
        """Note how far the epoch has come; returns whether that changes what to start."""
        return step.__class__ is int and self.schedule.reached(epoch, step, now, waited, self._strides)

    def loaded(self, entry: BlockEntry, began: float) -> None:
        """A block was loaded; its transfer started at `began`."""
        self._loads.add(entry.there - entry.asked)
        self._transfers.add(entry.there - began)

    def at_once(self) -> int:
        """How many loads to run at the same time, beside those that workers wait for.

        One, if that keeps up: parallel loads share the bandwidth, so that the one needed first ends late.
        Several, if one transfer takes longer than a block lasts, for example because of latency.
        """
        transfer, pace = self._transfers.mean, self._pace
        if not transfer or not pace:
            return 1
        return min(FETCHERS, math.ceil(transfer / (pace * self._source.steps_per_block)))

    def next_draw(self) -> Draw | None:
        """The steps to look at next, or None where enough is known."""
        return self.schedule.next_draw(self._pace, self._loads.lead)

    def next_start(self, now: float) -> BlockEntry | float | None:
        """The next block to start now, in the table already; else the seconds after which to ask again, if known."""
        upcoming = self.schedule.next_upcoming(self._table)
        if upcoming is None:
            return None
        first, number = upcoming
        nbytes, free_bytes = self._source.held_nbytes(number), self._table.free_bytes(self.schedule)
        if self.schedule.in_first_stride(first) and nbytes <= free_bytes:
            due_s: float | None = 0.0
        else:
            tick, pace = self.schedule.tick, self._pace
            until_s = None if pace is None else (first - tick) * pace - (now - self.schedule.tick_at)
            ahead = sum(entry.first > tick for entry in self._table)
            due_s = start_in(until_s, self._loads.lead, ahead, nbytes, free_bytes)
        if due_s != 0:
            return due_s
        self.schedule.upcoming.popleft()
        return self._table.add(number, first, now)
