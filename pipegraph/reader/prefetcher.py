"""When blocks are brought: what was measured of loads and of training, and what follows from it. No threads, no clock.

The caller holds a lock around everything here, and passes times in.
"""

from __future__ import annotations

import math
from typing import Any, Final, final

from pipegraph.reader.block_sources import Shelf
from pipegraph.reader.block_table import Entry, Held
from pipegraph.reader.prefetch_policy import Durations, preload
from pipegraph.reader.schedule import Draw, Itinerary
from pipegraph.reader.uses import Deal, Pace

FETCHERS: Final = 4
"""Blocks on their way at once, at most."""


@final
class Timetable:
    """Where training is, how fast it goes, how long loads take.

    Attributes:
        way: the running pass's steps.
    """

    def __init__(self, shelf: Shelf, held: Held, now: float) -> None:
        self._shelf, self._held = shelf, held
        self._loads = Durations()  # from being asked for to being there
        self._transfers = Durations()  # from the start of the transfer
        self._pace = Pace()
        self.way = Itinerary(shelf.stride, now)

    def restart(self, now: float) -> None:
        """Another run begins; what was measured still holds."""
        self.way = Itinerary(self._shelf.stride, now)

    def reached(self, epoch: int, step: Any, now: float, waited: float) -> bool:
        """Note how far the epoch has come; whether that changes what is to be started."""
        return step.__class__ is int and self.way.reached(epoch, step, now, waited, self._pace)

    def loaded(self, entry: Entry, began: float) -> None:
        """A block is there; its transfer began then."""
        self._loads.add(entry.there - entry.asked)
        self._transfers.add(entry.there - began)

    def at_once(self) -> int:
        """Loads that should run at the same time, beside those that are waited for.

        One, where that keeps up: loads that share a line end together, so that the one needed first ends late.
        Several where one transfer takes longer than a block lasts, which latency may be the reason of.
        """
        transfer, pace = self._transfers.mean, self._pace.mean
        if not transfer or not pace:
            return 1
        return min(FETCHERS, math.ceil(transfer / (pace * self._shelf.steps_per_switch)))

    def next_draw(self) -> Draw | None:
        """The steps to look at next, or None where enough is known."""
        return self.way.next_draw(self._pace.mean, self._loads.lead)

    def place(self) -> tuple[Deal, int] | None:
        """The epoch that is being read, and the step in it."""
        return self.way.place()

    def next_start(self, now: float) -> Entry | float | None:
        """The next block to start now, in the table already; else the seconds after which to ask again, if known."""
        upcoming = self.way.next_upcoming(self._held)
        if upcoming is None:
            return None
        first, number = upcoming
        ahead = sum(entry.first > self.way.tick for entry in self._held)
        pace = self._pace.mean
        # The policy counts in parts; here the step of each use is known: remaining + ahead * train is the
        # time until this one.
        train_s = None if pace is None else pace * self._shelf.steps_per_switch
        until = 0.0 if pace is None else (first - self.way.tick) * pace - (now - self.way.tick_at)
        decision = preload(
            remaining_s=until - ahead * (train_s or 0.0),
            train_s=train_s,
            lead_s=self._loads.lead,
            ahead=ahead,
            upcoming=[self._shelf.held_nbytes(number)],
            free_bytes=self._held.free_bytes(self.way),
        )
        if not decision.start:
            return decision.due_s
        self.way.upcoming.popleft()
        return self._held.add(number, first, now)
