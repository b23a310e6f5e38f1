"""Blocks of shards near at hand: fetched ahead of their use, shared by a stage's workers, bounded.

Every block that is in use, loaded or on its way is an entry of one table under one lock. Workers take
blocks from it and wait for those that are not there; fetch threads bring them; a scheduler thread decides
with ``pipegraph.storage.preload`` which to bring next and when. What is loaded too late, or was not
foreseen at all, is loaded when a worker asks for it: the schedule decides on time, never on data.
"""

from __future__ import annotations

import copy
import math
import os
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, Literal, final

from pipegraph.activity import Cancelled
from pipegraph.errors import LoaderClosedError
from pipegraph.operators.itinerary import Itinerary
from pipegraph.operators.lookahead import Deal, Pace, Uses
from pipegraph.operators.shelves import Shelf
from pipegraph.storage import ShardFile
from pipegraph.storage.preload import Durations, preload

FETCHERS: Final = 4
"""Blocks on their way at once, at most. See ``_at_once``."""

State = Literal["waiting", "loading", "ready", "failed"]


class _Entry:
    """One block of the table. Everything but ``number`` and ``nbytes`` changes under the reader's lock."""

    __slots__ = (
        "asked",
        "error",
        "file",
        "first",
        "fresh",
        "nbytes",
        "number",
        "pins",
        "state",
        "told",
        "value",
    )

    def __init__(self, number: int, nbytes: int, first: int, asked: float) -> None:
        self.number = number
        self.nbytes = nbytes
        self.first = first  # the step for which it is brought
        self.asked = asked
        self.fresh = True  # not used yet
        self.state: State = "waiting"
        self.pins = 0
        self.value: Any = None
        self.file: ShardFile | None = None
        self.error: Exception | None = None
        self.told: set[tuple[int, Any]] = set()


@final
class BlockReader:
    """The blocks of one stage, for all of its workers.

    Any thread may call anything.

    Args:
        shelf: where blocks come from; closed with the reader.
        ahead: whether blocks are fetched before they are asked for.
        count: adds to a named counter of the stage.
    """

    def __init__(self, shelf: Shelf, ahead: bool, count: Callable[[str, int], None]) -> None:
        self._shelf = shelf
        self._count = count
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # workers wait for blocks
        self._work = threading.Condition(self._lock)  # fetchers wait for orders
        self._planning = threading.Condition(self._lock)  # the scheduler waits for events and for its time
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._queue: deque[_Entry] = deque()
        self._held = 0
        self._most_open = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._doomed: list[ShardFile] = []
        self._cancelled = self._closed = False
        self._events = 0
        self._threads: list[threading.Thread] = []
        self._loads = Durations()  # from being asked for to being there
        self._transfers = Durations()  # from the start of the transfer
        self._loading = 0
        self._pace = Pace()
        self._way = Itinerary(shelf.stride, perf_counter())
        self._waiting = 0
        self._waits_since = self._waited = 0.0
        if shelf.near:
            for number in range(FETCHERS):
                self._begin_thread(self._fetch, f"fetch-{number}")
            if ahead:
                self._begin_thread(self._schedule, "preload")

    def _begin_thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"pipegraph-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- what will be read -----------------------------------------------------------------------

    def new_run(self) -> None:
        """What was dealt so far does not hold any more; what is loaded stays."""
        with self._lock:
            self._way = Itinerary(self._shelf.stride, perf_counter())
            for entry in self._queue:
                del self._entries[entry.number]
                self._held -= entry.nbytes
            self._queue.clear()
            for entry in self._entries.values():
                entry.first = -1
            self._replan()

    def dealt(self, deal: Deal) -> None:
        """An epoch's steps begin to be dealt, behind those of the deal before."""
        with self._lock:
            self._way.add(deal)
            self._replan()

    # -- workers ---------------------------------------------------------------------------------

    def acquire(self, number: int, epoch: int, step: Any) -> _Entry:
        """A loaded block, which stays until :meth:`release`; blocks until it is there.

        Args:
            step: of the sample for which it is wanted, or None where that is not known.

        Raises:
            Cancelled: the run is over.
            Exception: what its loading raised; asked for again for the same step, it is loaded again.
        """
        with self._lock:
            self._reached(epoch, step)
            entry = self._entries.get(number)
            if entry is not None and entry.state == "ready" and not self._cancelled:
                return self._use(entry)
        entry = self._wait_for(number, (epoch, step))
        self._sweep()
        return entry

    def release(self, entry: _Entry) -> None:
        """The end of a use."""
        with self._lock:
            entry.pins -= 1

    def _use(self, entry: _Entry) -> _Entry:
        entry.pins += 1
        self._entries.move_to_end(entry.number)
        if entry.fresh:
            entry.fresh = False
            self._replan()  # one block less is ahead
        return entry

    def _reached(self, epoch: int, step: Any) -> None:
        """Note how far the epoch has come."""
        if step.__class__ is int:
            now = perf_counter()
            if self._way.reached(epoch, step, now, self._total_wait(now), self._pace):
                self._replan()

    def _total_wait(self, now: float) -> float:
        return self._waited + (now - self._waits_since if self._waiting else 0.0)

    def _wait_for(self, number: int, asker: tuple[int, Any]) -> _Entry:
        waits = False
        with self._lock:
            try:
                while True:
                    if self._cancelled or self._closed:
                        raise Cancelled
                    entry = self._entries.get(number)
                    if entry is None:
                        entry = self._add(number, self._way.tick)
                        if self._shelf.near:
                            self._queue.appendleft(entry)
                            self._work.notify()
                        else:
                            self._load(entry)
                            continue
                    elif entry.state == "ready":
                        return self._use(entry)
                    elif entry.state == "failed":
                        assert entry.error is not None
                        if asker not in entry.told:
                            entry.told.add(asker)
                            raise _again(entry.error)
                        del self._entries[number]
                        continue
                    elif entry.state == "waiting" and entry.first > self._way.tick:
                        entry.first = self._way.tick  # it is late: now it comes before all others
                        self._queue.remove(entry)
                        self._queue.appendleft(entry)
                        self._work.notify()
                    if not waits:
                        waits = True
                        self._begin_wait()
                    entry.pins += 1  # it must not make room for another one before it was read
                    try:
                        self._arrived.wait()
                    finally:
                        entry.pins -= 1
            finally:
                if waits:
                    self._end_wait()

    def _begin_wait(self) -> None:
        if not self._waiting:
            self._waits_since = perf_counter()
        self._waiting += 1

    def _end_wait(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            waited = perf_counter() - self._waits_since
            self._waited += waited
            self._count("waits for blocks", 1)
            self._count("us waited for blocks", round(waited * 1e6))

    # -- the table -------------------------------------------------------------------------------

    def _add(self, number: int, first: int) -> _Entry:
        """A new entry, and room for it as far as there is any."""
        nbytes = self._shelf.held_nbytes(number)
        self._make_room(nbytes)
        entry = self._entries[number] = _Entry(number, nbytes, first, perf_counter())
        self._held += nbytes
        return entry

    def _make_room(self, nbytes: int, after: _Entry | None = None) -> None:
        """Let go of blocks that nobody reads: those of no known further use first, then the least recently used.

        Args:
            after: a block that turned out to be larger than thought; it stays, and so do those that are needed.
        """
        budget = self._shelf.budget()
        for spare_needed in (True, False) if after is None else (True,):
            # What lies in the node cache is opened again at once, and while it is open it cannot be evicted, even
            # where the plan wants its place for another: what is not needed soon is closed.
            closes_all = spare_needed and self._shelf.keeps and self._way.scanned > self._way.tick
            for entry in list(self._entries.values()):
                if not closes_all and self._held + nbytes <= budget and len(self._entries) < self._most_open:
                    return
                if (
                    entry.state == "ready"
                    and not entry.pins
                    and not (spare_needed and self._is_needed(entry))
                ):
                    self._drop(entry)

    def _is_needed(self, entry: _Entry) -> bool:
        return self._way.needs(entry.number) or entry.first > self._way.tick

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.number]
        self._held -= entry.nbytes
        if entry.file is not None:
            self._doomed.append(entry.file)
        entry.file = entry.value = None

    def _sweep(self) -> None:
        """Close what was let go of, outside the lock."""
        if not self._doomed:
            return
        with self._lock:
            doomed, self._doomed = self._doomed, []
        for file in doomed:
            file.close()

    # -- loading ---------------------------------------------------------------------------------

    def _load(self, entry: _Entry) -> None:
        """Bring one block. Called with the lock held, which is let go of meanwhile."""
        entry.state = "loading"
        self._loading += 1
        began = perf_counter()
        self._lock.release()
        try:
            entry.file, entry.value = self._shelf.open(entry.number)
        except LoaderClosedError:
            pass
        except Exception as caught:
            entry.error = caught
        finally:
            self._lock.acquire()
            self._loading -= 1
            if entry.file is not None:
                now = perf_counter()
                entry.state = "ready"
                nbytes = self._shelf.held_nbytes(entry.number)  # a part's size may be known only now
                self._held += nbytes - entry.nbytes
                entry.nbytes = nbytes
                self._make_room(0, after=entry)
                self._loads.add(now - entry.asked)
                self._transfers.add(now - began)
                self._count("blocks loaded", 1)
            else:
                entry.state = "failed"
                self._held -= entry.nbytes
                if entry.error is None:  # the reader closes, or an inline worker was interrupted
                    del self._entries[entry.number]
            self._arrived.notify_all()
            self._replan()
            self._work.notify()

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

    def _may_load(self, entry: _Entry) -> bool:
        return entry.first <= self._way.tick or self._loading < self._at_once()

    def _at_once(self) -> int:
        """Loads that should run at the same time, beside those that are waited for.

        One, where that keeps up: loads that share a line end together, so that the one needed first ends late.
        Several where one transfer takes longer than a block lasts, which latency may be the reason of.
        """
        transfer, pace = self._transfers.mean, self._pace.mean
        if not transfer or not pace:
            return 1
        return min(FETCHERS, math.ceil(transfer / (pace * self._shelf.steps_per_switch)))

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
                events, way = self._events, self._way
                draw, place = way.next_draw(self._pace.mean, self._loads.lead), way.place()
            if place is not None:
                self._shelf.follow(*place)
            if draw is not None:
                uses = Uses.of(draw.deal.blocks(draw.first, draw.last), draw.base + draw.first)
                with self._lock:
                    way.merge(uses, draw.base + draw.last, self._entries)
                continue
            with self._lock:
                due = None if self._cancelled else self._start_due()
                if events == self._events and not self._closed:
                    # Not a poll: the time at which the policy wants the next block to be started.
                    self._planning.wait(due)
            self._sweep()

    def _start_due(self) -> float | None:
        """Start what the policy wants started now; seconds after which it wants to be asked again."""
        now = perf_counter()
        while (upcoming := self._way.next_upcoming(self._entries)) is not None:
            first, number = upcoming
            nbytes = self._shelf.held_nbytes(number)
            ahead = sum(entry.first > self._way.tick for entry in self._entries.values())
            pace = self._pace.mean
            # The policy counts in parts; here the step of each use is known: remaining + ahead * train is the
            # time until this one.
            train_s = None if pace is None else pace * self._shelf.steps_per_switch
            until = 0.0 if pace is None else (first - self._way.tick) * pace - (now - self._way.tick_at)
            decision = preload(
                remaining_s=until - ahead * (train_s or 0.0),
                train_s=train_s,
                lead_s=self._loads.lead,
                ahead=ahead,
                upcoming=[nbytes],
                free_bytes=self._free_bytes(),
            )
            if not decision.start:
                return decision.due_s
            self._way.upcoming.popleft()
            self._queue.append(self._add(number, first))
            self._work.notify()
        return None

    def _free_bytes(self) -> int:
        """What blocks to come may take: all that is not held by blocks that are still needed."""
        if len(self._entries) >= self._most_open and all(map(self._is_needed, self._entries.values())):
            return 0
        needed = sum(
            entry.nbytes
            for entry in self._entries.values()
            if entry.state != "failed" and (entry.pins or entry.state != "ready" or self._is_needed(entry))
        )
        return self._shelf.budget() - needed

    # -- the end ---------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End every wait of a worker with ``Cancelled``, and of those to come; loads go on."""
        with self._lock:
            self._cancelled = True
            self._arrived.notify_all()

    def uncancel(self) -> None:
        """Workers may wait again."""
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
        for entry in list(self._entries.values()):
            if entry.state != "failed":
                self._drop(entry)
        self._sweep()
        self._shelf.close()

    def __repr__(self) -> str:
        with self._lock:
            states = [entry.state for entry in self._entries.values()]
        shown = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "empty"
        return f"<BlockReader {os.getpid()}: {shown}>"


def _again(error: Exception) -> Exception:
    """The same error for another sample: notes that one gets are not to be seen at the others."""
    fresh = copy.copy(error)
    fresh.__notes__ = list(getattr(error, "__notes__", ()))
    fresh.__cause__ = error.__cause__
    return fresh.with_traceback(error.__traceback__)
