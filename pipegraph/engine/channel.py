"""A bounded, closable queue between two stages, with statistics.

Behaviour contract (what differs from this is a bug):

* It never holds more than ``capacity`` items, nor more than ``max_bytes`` bytes, except that an
  empty one admits one item of any size. The samples of a bundle count one by one.
* ``put`` appends; ``put_at(seq, ...)`` appends in the order of sequence numbers (see ``reorder``), for
  stages with several workers. Items of later numbers wait inside, within the same bound, and always
  leave room for one item (bundle) of the number that is next: the head of the line can never be locked out.
* Waiting takes no time slices and no timeouts: a waiter is queued under the channel's lock and woken
  by whoever makes its condition true. ``cancel`` wakes everybody with ``Cancelled``.
* A put returns False for an item that is not wanted (``unwanted``); of a bundle it takes what is.
* Whoever waits for an item asks the stage above for what it has finished (``starved``), once it is queued.

All state changes under ``_lock``. Lock order: channel, then activity, account or watermark; never two channels.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch
from pipegraph.engine.activity import Activity, Cancelled, Waiter
from pipegraph.engine.reorder import ReorderBuffer
from pipegraph.engine.unwanted import Unwanted

LIGHT_BYTES = 1 << 20
"""Beyond ``heavy_capacity`` a channel holds more items only while all are lighter than this together."""

NOBODY = sys.maxsize
"""Items that the waiting getters need, where none waits."""


@dataclass(frozen=True)
class ChannelStats:
    """One look at a channel. Waits are nanoseconds summed over threads, running waits included."""

    capacity: int
    depth: int
    nbytes: int
    puts: int
    gets: int
    put_wait_ns: int
    get_wait_ns: int
    putters_waiting: int
    getters_waiting: int
    grown: int


class Pump(Protocol):
    """An inline stage: whoever waits for its output drives it."""

    def try_enter(self) -> bool:
        """Become the driver; False while another thread is."""

    def step(self) -> None:
        """Do one unit of work."""

    def leave(self) -> None:
        """Let another waiter drive."""


class Channel:
    """See the module docstring.

    Args:
        capacity: items it may hold, at least 1.
        max_bytes: bytes it may hold; None is unbounded.
        activity: counts waiting threads; one of its own if not given.
        sequenced: whether ``put_at`` will be used.
        bundle_rows: samples in one bundle, at most; 1 for a channel of other items.
        heavy_capacity: items that it holds of any weight; None: as many as ``capacity``.

    Attributes:
        readers: threads that get from it.
        demand: while all readers wait, how many items the one that needs the fewest can use; else ``NOBODY``.
        starved: called with that number by a getter that is about to wait, outside the lock.
        share: called with a bundle's buffers when it is taken in parts, under the lock.
    """

    def __init__(
        self,
        capacity: int,
        max_bytes: int | None = None,
        activity: Activity | None = None,
        sequenced: bool = False,
        bundle_rows: int = 1,
        heavy_capacity: int | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.activity = activity or Activity()
        self.pump: Pump | None = None
        self.on_take: Callable[[int, Any], None] | None = None
        self.may_take: Callable[[int], bool] | None = None
        self.starved: Callable[[int], None] | None = None
        self.readers = 1
        self.share: Callable[[Any], None] = lambda buffers: None
        self.demand = NOBODY
        self._lock = threading.Lock()
        self._ready: deque[Any] = deque()
        self._offset = 0  # samples of the first bundle that have been taken
        self._reorder: ReorderBuffer[Any] | None = ReorderBuffer() if sequenced else None
        self._capacity = capacity
        self._bundle_rows = bundle_rows
        self._heavy_capacity = capacity if heavy_capacity is None else heavy_capacity
        self._held = 0
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._cancelled = False
        self._unwanted = Unwanted()
        self._putters: deque[Waiter] = deque()
        self._getters: deque[Waiter] = deque()
        self._watchers: list[tuple[Callable[[ChannelStats], bool], threading.Lock]] = []
        self._tickets = 0
        self._gets = 0
        self._put_wait_ns = 0
        self._get_wait_ns = 0
        self._grown = 0

    # -- putting -------------------------------------------------------------------------------

    def put(self, item: Any) -> bool:
        """Append; blocks while full. False if the item was discarded.

        Raises:
            Cancelled: the channel was cancelled.
        """
        return self._put(-1, item, False, None)

    def put_at(self, seq: int, item: Any, last: bool = True) -> bool:
        """Append in the order of sequence numbers; blocks while there is no room for this one."""
        return self._put(seq, item, last, None)

    def put_stamped(self, seq: int, item: Any, stamp: Callable[[Any], None]) -> bool:
        """Append to a number that stays open; ``stamp(item)`` runs at the very moment, under the lock."""
        return self._put(seq, item, False, stamp)

    def offer(self, seq: int, item: Any, stamp: Callable[[Any], None] | None = None) -> bool:
        """As a put that never blocks, and closes nothing; False if there is no room now. Refused items end here."""
        with self._lock:
            if self._cancelled or not self._admits(seq, item):
                return False
            self._enter(seq, item, False, stamp)
            return True

    def close_seq(self, seq: int) -> None:
        """No more items for this number. Never blocks."""
        assert self._reorder is not None
        with self._lock:
            self._release(self._reorder.close(seq))

    def wait_turn(self, seq: int) -> None:
        """Blocks until every lower number is closed."""
        reorder = self._reorder
        assert reorder is not None
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if reorder.next >= seq:
                    return
                waiter = self._queue_putter(seq, None)
            self._wait(waiter, self._putters)

    def at_head(self, seq: int) -> bool:
        """Whether every lower number is closed. Without the lock: once true it stays so."""
        assert self._reorder is not None
        return self._reorder.next >= seq

    def _admits(self, seq: int, item: Any) -> bool:
        after = self._held + (len(item.lineages) if item.__class__ is Bundle else 1)
        nbytes = self._nbytes + item.nbytes
        room = self._capacity if nbytes <= LIGHT_BYTES else self._heavy_capacity
        fits = self._max_bytes is None or nbytes <= self._max_bytes
        if self._reorder is not None and seq > self._reorder.next:
            return after <= room - self._bundle_rows and fits
        return (after <= room and fits) or (not self._ready and after <= self._capacity)

    def _put(self, seq: int, item: Any, last: bool, stamp: Callable[[Any], None] | None) -> bool:
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if self._admits(seq, item) or (
                    self._unwanted.active and self._unwanted.left_of(item) is None
                ):
                    return self._enter(seq, item, last, stamp)
                waiter = self._queue_putter(seq, item)
            self._wait(waiter, self._putters)

    def _enter(self, seq: int, item: Any, last: bool, stamp: Callable[[Any], None] | None) -> bool:
        left = self._unwanted.left_of(item) if self._unwanted.active else item
        if stamp is not None:
            stamp(item if left is None else left)
        if left is None:
            if last and self._reorder is not None:
                self._release(self._reorder.close(seq))
            return False
        self._nbytes += left.nbytes
        self._held += len(left.lineages) if left.__class__ is Bundle else 1
        if self._reorder is None:
            self._append(left)
        else:
            self._release(self._reorder.add(seq, left, last))
        return True

    def _release(self, items: list[Any]) -> None:
        """Items have come to the head of the line, or the head has moved on."""
        for item in items:
            self._append(item)
        if self._putters:
            self._wake_putter()
            self._changed()

    def _append(self, item: Any) -> None:
        if self._unwanted.active and item.__class__ is EndOfEpoch:
            # Only now: under another number an item of the epoch may still have been on its way.
            self._unwanted.ended(item.epoch)
        self._ready.append(item)
        if self._getters:
            self._wake_getter()
        if self._watchers:
            self._notify_watchers()

    # -- getting -------------------------------------------------------------------------------

    def get(self, needed: int = 1) -> Any:
        """The next item; blocks while there is none, for the sake of so many."""
        return self.take(None, needed)[1]

    def take(
        self, rows: int | None = None, needed: int = 1, elsewhere: Callable[[], bool] | None = None
    ) -> tuple[int, Any]:
        """``(ticket, item)``: items in order, tickets 0, 1, 2 ... in order, to any number of threads.

        Args:
            rows: samples of a bundle, at most; the rest of it stays.
            needed: items without which the caller cannot continue; see :attr:`demand`.
            elsewhere: where this says (after a ``nudge_all``) that there is other work, ``(-1, None)`` is returned.
        """
        while True:
            pump = None
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if elsewhere is not None and elsewhere():
                    return -1, None
                ticket = self._tickets
                may = self.may_take
                if self._ready and (may is None or may(ticket)):
                    item = self._pop(rows)
                    self._tickets += 1
                    if self.on_take is not None:
                        self.on_take(ticket, item)
                    if self._putters:
                        self._wake_putter()
                    if self._ready and self._getters:
                        self._wake_getter()  # it may have waited for the window, or for the rest of a bundle
                    if self._watchers:
                        self._notify_watchers()
                    return ticket, item
                if not self._ready and self.pump is not None and self.pump.try_enter():
                    pump = self.pump
                else:
                    waiter = self._queue_getter(needed)
            if pump is not None:
                try:
                    pump.step()
                finally:
                    pump.leave()
                continue
            if self.starved is not None:
                self.starved(needed)
            self._wait(waiter, self._getters)

    def _pop(self, rows: int | None) -> Any:
        item = self._ready[0]
        if item.__class__ is not Bundle:
            self._held -= 1
            self._gets += 1
            self._nbytes -= item.nbytes
            return self._ready.popleft()
        offset, count = self._offset, len(item.lineages)
        left = count - offset
        taken = left if rows is None or rows >= left else rows
        if taken == left:
            self._ready.popleft()
            self._offset = 0
            if offset:
                item = item.share(offset, count)
        else:
            self._offset = offset + taken
            if item.buffers:
                self.share(item.buffers)
            item = item.share(offset, offset + taken)
        self._held -= taken
        self._gets += taken
        self._nbytes -= item.nbytes
        return item

    def peek(self) -> None:
        """Blocks until there is an item, and leaves it."""
        self.take(elsewhere=lambda: bool(self._ready))

    def ahead(self) -> tuple[int, Any]:
        """How many chunks can be got at once, and the token behind them, if one is there."""
        with self._lock:
            chunks = -self._offset
            for item in self._ready:
                if not isinstance(item, Chunk):
                    return chunks, item
                chunks += len(item.lineages) if item.__class__ is Bundle else 1
            return chunks, None

    def nudge(self) -> None:
        """Let one waiting getter look again."""
        with self._lock:
            if self._getters:
                self._wake_getter()
                self._changed()

    def nudge_all(self) -> None:
        """Let every waiting getter look again."""
        with self._lock:
            while self._getters:
                self._wake_getter()
            self._changed()

    # -- waiting -------------------------------------------------------------------------------

    def _queue_putter(self, seq: int, item: Any) -> Waiter:
        waiter = Waiter(perf_counter_ns(), seq, item)
        self._putters.append(waiter)
        self._changed()
        return waiter

    def _queue_getter(self, needed: int) -> Waiter:
        waiter = Waiter(perf_counter_ns(), needed=needed)
        self._getters.append(waiter)
        self._set_demand()
        self._changed()
        return waiter

    def _wake_putter(self) -> None:
        """Wake the waiting putter whose number comes first: it is the one that can be admitted."""
        first = self._putters[0] if self._reorder is None else self._first_putter()
        self._putters.remove(first)
        first.wake(self.activity)

    def _first_putter(self) -> Waiter:
        return min(self._putters, key=lambda waiter: waiter.seq)

    def _wake_getter(self) -> None:
        self._getters.popleft().wake(self.activity)
        self._set_demand()

    def _set_demand(self) -> None:
        getters = self._getters
        waits = len(getters) >= self.readers
        self.demand = min([waiter.needed for waiter in getters]) if waits else NOBODY

    def _wait(self, waiter: Waiter, queue: deque[Waiter]) -> None:
        try:
            waiter.wait(self.activity)
        except BaseException:
            # Interrupted (Ctrl-C). If the wake came already it belongs to somebody else now.
            with self._lock:
                if waiter in queue:
                    queue.remove(waiter)
                    self._set_demand()
                    self.activity.resume()
                elif queue:
                    (self._wake_putter if queue is self._putters else self._wake_getter)()
                self._changed()
            raise
        waited = perf_counter_ns() - waiter.since_ns
        with self._lock:
            if queue is self._putters:
                self._put_wait_ns += waited
            else:
                self._get_wait_ns += waited

    def _changed(self) -> None:
        if self._watchers:
            self._notify_watchers()

    # -- control -------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Everybody who waits here, now or later, gets ``Cancelled``; held items are dropped."""
        with self._lock:
            self._cancelled = True
            self._ready.clear()
            if self._reorder is not None:
                self._reorder = ReorderBuffer()
            self._nbytes = self._held = self._offset = 0
            for waiter in (*self._putters, *self._getters):
                waiter.wake(self.activity)
            self._putters.clear()
            self._getters.clear()
            self.demand = NOBODY
            self._changed()

    def discard(self, epoch: int) -> list[Chunk]:
        """Nobody wants chunks of ``epoch`` (or earlier) any more; returns those it held."""
        with self._lock:
            self._unwanted.discard(epoch)
            dropped: list[Chunk] = []
            kept: deque[Any] = deque()
            for item in self._ready:
                (dropped if isinstance(item, Chunk) and item.epoch <= epoch else kept).append(item)
            if dropped:
                first = self._ready[0]
                if self._offset and first is dropped[0] and isinstance(first, Bundle):
                    dropped[0] = first.share(self._offset, len(first.lineages))
                    self._offset = 0
                self._ready = kept
                self._nbytes -= sum(item.nbytes for item in dropped)
                self._held -= sum(len(item.lineages) if item.__class__ is Bundle else 1 for item in dropped)
            for waiter in self._putters:
                waiter.wake(self.activity)
            self._putters.clear()
            self._changed()
            return dropped

    def discards(self, epoch: int) -> bool:
        """Whether chunks of ``epoch`` are refused."""
        with self._lock:
            return epoch <= self._unwanted.discarded

    def skip(self, epoch: int, seen: Callable[[Any], bool]) -> None:
        """Take out the chunks of ``epoch`` for which ``seen`` is true: they were delivered before the run began."""
        with self._lock:
            self._unwanted.skip(epoch, seen)

    def full(self) -> bool:
        """Whether the item that must come next waits for room."""
        with self._lock:
            return self._blocked() is not None

    def _blocked(self) -> Waiter | None:
        if not self._putters:
            return None
        first = self._first_putter()
        at_head = self._reorder is None or first.seq <= self._reorder.next
        return first if first.item is not None and at_head else None

    def grow(self) -> int:
        """Parks' rule: room for the one item that must come next. Returns the new capacity."""
        with self._lock:
            waiter = self._blocked()
            if waiter is None:
                return self._capacity
            assert waiter.item is not None
            rows = len(waiter.item.lineages) if waiter.item.__class__ is Bundle else 1
            self._capacity = max(self._capacity, self._held + max(rows, self._bundle_rows))
            self._heavy_capacity = max(self._heavy_capacity, self._capacity)
            if self._max_bytes is not None:
                self._max_bytes = max(self._max_bytes, self._nbytes + waiter.item.nbytes)
            self._grown += 1
            self._putters.remove(waiter)
            waiter.wake(self.activity)
            self._changed()
            return self._capacity

    # -- looking -------------------------------------------------------------------------------

    def _stats(self, now_ns: int | None = None) -> ChannelStats:
        now = perf_counter_ns() if now_ns is None else now_ns
        return ChannelStats(
            capacity=self._capacity,
            depth=self._held,
            nbytes=self._nbytes,
            puts=self._gets + self._held,
            gets=self._gets,
            put_wait_ns=self._put_wait_ns + sum(max(0, now - waiter.since_ns) for waiter in self._putters),
            get_wait_ns=self._get_wait_ns + sum(max(0, now - waiter.since_ns) for waiter in self._getters),
            putters_waiting=len(self._putters),
            getters_waiting=len(self._getters),
            grown=self._grown,
        )

    def stats(self, now_ns: int | None = None) -> ChannelStats:
        """One consistent look; waits that still run count up to ``now_ns``, by default now."""
        with self._lock:
            return self._stats(now_ns)

    def wait_until(self, condition: Callable[[ChannelStats], bool]) -> None:
        """Blocks until ``condition`` holds (for tests: wait for a state, never for time)."""
        notified = threading.Lock()
        notified.acquire()
        with self._lock:
            if condition(self._stats()):
                return
            self._watchers.append((condition, notified))
        notified.acquire()

    def _notify_watchers(self) -> None:
        stats = self._stats()
        for watcher in list(self._watchers):
            if watcher[0](stats):
                self._watchers.remove(watcher)
                watcher[1].release()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<Channel {stats.depth}/{stats.capacity}>"
