"""Blocks of shards near at hand: fetched ahead of their use, shared by a stage's workers, bounded.

Every block that is in use, loaded or on its way is an entry of one table under one lock. Workers take
blocks from it and wait for those that are not there; fetch threads bring them; a scheduler thread decides
with ``pipegraph.reader.prefetch_policy`` which to bring next and when. What is loaded too late, or was not
foreseen at all, is loaded when a worker asks for it: the schedule decides on time, never on data.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, final

from pipegraph.engine.activity import Cancelled
from pipegraph.errors import LoaderClosedError
from pipegraph.reader.block_sources import Shelf
from pipegraph.reader.block_table import Entry, Held
from pipegraph.reader.cold_start import FirstBlocks
from pipegraph.reader.late_blocks import Standing, Switches
from pipegraph.reader.loads import GaveWayError, Loads
from pipegraph.reader.prefetcher import FETCHERS, Timetable
from pipegraph.reader.uses import Deal, Uses


@final
class BlockReader:
    """The blocks of one stage, for all of its workers.

    Any thread may call anything.

    Args:
        shelf: where blocks come from; closed with the reader.
        ahead: whether blocks are fetched before they are asked for.
        count: adds to a named counter of the stage.
        switches: told of each block that is entered, and how late it came.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        shelf: Shelf,
        ahead: bool,
        count: Callable[[str, int], None],
        switches: Switches | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._shelf, self._ahead = shelf, ahead
        self._count, self._clock = count, clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # workers wait for blocks
        self._work = threading.Condition(self._lock)  # fetchers wait for orders
        self._planning = threading.Condition(self._lock)  # the scheduler waits for events and for its time
        self._held = Held(shelf)
        self._loads = Loads(shelf, self._held, self._arrived)
        self._queue: deque[Entry] = deque()
        self._cancelled = self._closed = False
        self._events = 0
        self._threads: list[threading.Thread] = []
        self._times = Timetable(shelf, self._held, clock())
        self._switches = switches or Switches()
        self._switches.begin(clock())
        self._standing = Standing()
        self._opening = shelf.opening
        self._first = FirstBlocks(self._opening)
        if shelf.near:
            for number in range(FETCHERS):
                self._begin_thread(self._fetch, f"fetch-{number}")
            # Without preloading too: what is known of the next uses decides what goes.
            self._begin_thread(self._schedule, "preload")

    def _begin_thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"pipegraph-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- what will be read -----------------------------------------------------------------------

    def new_run(self) -> None:
        """What was dealt so far does not hold any more; what is loaded stays."""
        if self._opening is not None:
            self._opening.begin()
        with self._lock:
            self._times.restart(self._clock())
            self._switches.new_run()
            self._first.restart()
            for entry in self._queue:
                self._held.drop(entry)
            self._queue.clear()
            for entry in self._held:
                entry.first, entry.wanted, entry.awaited = -1, None, False
            self._replan()

    def dealt(self, deal: Deal) -> None:
        """An epoch's steps begin to be dealt, behind those of the deal before."""
        with self._lock:
            self._times.way.add(deal)
            for entry in self._held:
                # What was told in epochs that are over is not asked for again.
                entry.told = {told for told in entry.told if told[0] >= deal.epoch - 1}
            self._replan()

    # -- workers ---------------------------------------------------------------------------------

    def sample(self, number: int, index: int, epoch: int, step: Any) -> Any:
        """A copy of sample ``index`` of a block, None where it was filtered out; blocks until it is there.

        Raises as :meth:`acquire`.
        """
        entry = None
        if self._opening is not None and self._is_first(number, epoch, step):
            if not self._shelf.is_here(number):
                sample = self._opening.read(number, index)
                if sample is not None:
                    self._count("samples read by ranges", 1)
                    return sample
            with self._lock:
                if self._first.waits_for(self._shelf.held_nbytes(number)):
                    self._let_blocks_come()
        entry = self.acquire(number, epoch, step)
        try:
            found = entry.value[index]
            return None if found is None else dict(found)
        finally:
            self.release(entry)

    def acquire(self, number: int, epoch: int, step: Any) -> Entry:
        """A loaded block, which stays until :meth:`release`; blocks until it is there.

        Args:
            step: of the sample for which it is wanted, or None where that is not known.

        Raises:
            Cancelled: the run is over.
            Exception: what its loading raised; asked for again for the same step, it is loaded again.
        """
        with self._lock:
            self._reached(epoch, step)
            entry = self._held.get(number)
            if entry is not None and entry.state == "ready" and not self._cancelled:
                return self._use(entry, epoch, step)
        entry = self._wait_for(number, epoch, step)
        self._sweep()
        return entry

    def release(self, entry: Entry) -> None:
        """The end of a use."""
        with self._lock:
            entry.pins -= 1
            self._loads.released()

    def _use(self, entry: Entry, epoch: int, step: Any) -> Entry:
        self._held.use(entry)
        if entry.fresh:
            entry.fresh = False
            self._note_switch(entry, epoch, step)
            self._replan()  # one block less is ahead
        return entry

    def _reached(self, epoch: int, step: Any) -> None:
        """Note how far the epoch has come."""
        now = self._clock()
        if self._times.reached(epoch, step, now, self._standing.total(now)):
            self._replan()

    def _wait_for(self, number: int, epoch: int, step: Any) -> Entry:
        waits = False
        with self._lock:
            try:
                while True:
                    if self._cancelled or self._closed:
                        raise Cancelled
                    entry = self._held.get(number)
                    if entry is None:
                        entry = self._held.add(number, self._times.way.tick, self._clock())
                        if self._shelf.near:
                            self._await(entry)
                            self._queue.appendleft(entry)
                            self._work.notify()
                        else:
                            self._load(entry)
                            continue
                    elif entry.state == "ready":
                        return self._use(entry, epoch, step)
                    elif entry.state == "failed":
                        assert entry.error is not None
                        if (epoch, step) not in entry.told:
                            entry.told.add((epoch, step))
                            raise _again(entry.error)
                        self._held.drop(entry)
                        continue
                    elif entry.state == "waiting" and not entry.awaited:
                        self._queue.remove(entry)  # it is late: now it comes before all others
                        self._queue.appendleft(entry)
                        self._await(entry)
                        self._work.notify()
                    else:
                        self._await(entry)
                    if not waits:
                        waits = True
                        self._standing.begin(self._clock())
                    entry.pins += 1  # it must not make room for another one before it was read
                    try:
                        self._arrived.wait()
                    finally:
                        entry.pins -= 1
                        self._loads.released()
            finally:
                if waits:
                    waited = self._standing.end(self._clock())
                    if waited is not None:
                        self._count("waits for blocks", 1)
                        self._count("us waited for blocks", round(waited * 1e6))

    def _await(self, entry: Entry) -> None:
        entry.awaited = True
        entry.first = min(entry.first, self._times.way.tick)
        if entry.wanted is None:
            entry.wanted = self._clock()

    def _note_switch(self, entry: Entry, epoch: int, step: Any) -> None:
        if self._shelf.near:
            now = self._clock()
            self._switches.entered(
                self._shelf.name(entry.number),
                epoch,
                step if step.__class__ is int else -1,
                entry.wanted,
                entry.there,
                now,
                self._standing.total(now),
                self._times.way.opening,
            )

    # -- the opening -----------------------------------------------------------------------------

    def _is_first(self, number: int, epoch: int, step: Any) -> bool:
        """Whether a sample may be read by ranges; its block is then ordered, to come once the opening is over."""
        with self._lock:
            way = self._times.way
            if not way.opening and not self._first:
                return False
            self._reached(epoch, step)
            entry = self._held.get(number)
            if self._cancelled or (entry is not None and entry.state in ("ready", "failed")):
                self._first.discard(number)
                return False
            if way.opening and not (entry is not None and entry.awaited):
                self._first.add(number, self._shelf.held_nbytes(number))
                if entry is None:
                    self._queue.append(self._held.add(number, way.tick, self._clock()))
            if self._first.has_ended(way.opening):
                self._let_blocks_come()
            return number in self._first

    def _let_blocks_come(self) -> None:
        self._work.notify_all()
        self._replan()

    # -- loading ---------------------------------------------------------------------------------

    def _load(self, entry: Entry) -> None:
        """Bring one block. Called with the lock held, which is let go of meanwhile."""
        self._loads.begin(entry, self._times.way)
        began = self._clock()
        self._lock.release()
        gave_way = False
        try:
            entry.file, entry.value = self._shelf.open(entry.number, partial(self._grow, entry))
        except GaveWayError:
            gave_way = True
        except LoaderClosedError:
            pass
        except Exception as caught:
            entry.error = caught
        finally:
            self._lock.acquire()
            self._loads.end(entry)
            if gave_way:
                self._held.put_back(entry)
                self._queue.appendleft(entry)
            elif entry.value is not None or entry.file is not None:
                entry.there = self._clock()
                self._held.loaded(entry, self._times.way)
                self._times.loaded(entry, began)
                self._count("blocks loaded", 1)
            else:
                self._held.failed(
                    entry
                )  # without an error: the reader closes, or an inline worker was interrupted
            if entry.number in self._first and not gave_way:
                self._first.discard(entry.number)
                if self._opening is not None and not self._first:
                    self._opening.end()
            self._arrived.notify_all()
            self._replan()
            self._work.notify()

    def _grow(self, entry: Entry, nbytes: int) -> None:
        with self._lock:
            self._loads.grow(entry, nbytes, self._times.way, lambda: self._closed)

    def _fetch(self) -> None:
        """The life of a fetch thread."""
        while True:
            with self._lock:
                while not self._closed and not (self._queue and self._may_load(self._queue[0])):
                    self._work.wait()
                if self._closed:
                    return
                self._load(self._queue.popleft())
            self._sweep()

    def _may_load(self, entry: Entry) -> bool:
        if not self._loads.may_begin(entry):
            return False
        if entry.awaited:
            return True
        return not self._first.hold_back and (
            entry.first <= self._times.way.tick or len(self._loads) < self._times.at_once()
        )

    def _sweep(self) -> None:
        """Close what was let go of, outside the lock."""
        if not self._held.doomed:
            return
        with self._lock:
            doomed, self._held.doomed = self._held.doomed, []
        for file in doomed:
            file.close()

    # -- the schedule ----------------------------------------------------------------------------

    def _replan(self) -> None:
        """Something has changed that the schedule depends on; called with the lock held."""
        self._events += 1
        self._planning.notify()

    def _schedule(self) -> None:
        """The life of the scheduler's thread."""
        while True:
            with self._lock:
                if self._closed:
                    return
                events, way = self._events, self._times.way
                draw, place = self._times.next_draw(), self._times.place()
            if place is not None:
                self._shelf.follow(*place)
            if draw is not None:
                uses = Uses.of(draw.deal.blocks(draw.first, draw.last), draw.base + draw.first)
                with self._lock:
                    way.merge(uses, draw.base + draw.last, self._held)
                continue
            with self._lock:
                waits = self._cancelled or self._first.hold_back or not self._ahead
                due = None if waits else self._start_due()
                if events == self._events and not self._closed:
                    # Not a poll: the time at which the policy wants the next block to be started.
                    self._planning.wait(due)
            self._sweep()

    def _start_due(self) -> float | None:
        """Start what the policy wants started now; seconds after which it wants to be asked again."""
        while isinstance(started := self._times.next_start(self._clock()), Entry):
            self._queue.append(started)
            self._work.notify()
        return started

    # -- the end ---------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End every wait of a worker with ``Cancelled``, and of those to come; loads go on."""
        with self._lock:
            self._cancelled = True
            self._arrived.notify_all()
        if self._opening is not None:
            self._opening.cancel()

    def uncancel(self) -> None:
        """Workers may wait again."""
        if self._opening is not None:
            self._opening.begin()
        with self._lock:
            self._cancelled = False
            self._replan()

    def close(self) -> None:
        """End every thread and close every file."""
        with self._lock:
            self._closed = True
            for condition in (self._arrived, self._work, self._planning):
                condition.notify_all()
        self._shelf.interrupt()
        for thread in self._threads:
            thread.join()
        for entry in self._held:
            if entry.state != "failed":
                self._held.drop(entry)
        self._sweep()
        self._shelf.close()

    @property
    def nbytes(self) -> int:
        """Held in memory now."""
        with self._lock:
            return self._held.nbytes

    def __repr__(self) -> str:
        with self._lock:
            states = [entry.state for entry in self._held]
        shown = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "empty"
        return f"<BlockReader {os.getpid()}: {shown}>"


def _again(error: Exception) -> Exception:
    """The same error for another sample: notes that one gets are not to be seen at the others."""
    fresh = copy.copy(error)
    fresh.__notes__ = list(getattr(error, "__notes__", ()))
    fresh.__cause__ = error.__cause__
    return fresh.with_traceback(error.__traceback__)
