"""A bounded, closable queue between two stages, with statistics.

Behaviour contract (what differs from this is a bug):

* It never holds more than ``capacity`` items, nor more than ``max_bytes`` bytes, except that an
  empty one admits one item of any size (``Contents.admits``), and all that an inline stage makes in a step that its
  own reader drives. The samples of a bundle count one by one.
* ``put`` appends; ``put_at(seq, ...)`` appends in the order of sequence numbers (see ``reorder``), for
  stages with several workers. Items of later numbers wait inside, within the same bound, and always
  leave room for one item (bundle) of the number that is next: the head of the line can never be locked out.
* Waits use no polling and no timeouts: a waiter is queued under the channel's lock and woken
  by the thread that makes its condition true. ``cancel`` wakes all waiters with ``Cancelled``.
* A thread that makes room also enters the waiting putters' items, then wakes these threads: the queue
  does not stay empty until they run.
* After a put with ``more`` no reader is woken: the caller puts another item or calls ``nudge`` before it waits for
  anything. A put that has to wait for room wakes a reader first.
* A put returns False for an unwanted item (``unwanted``); the unwanted samples of a bundle are left out.

All state changes under ``_lock``. Lock order: channel, then activity, account or watermark; never two channels.
Invariant: while the lock is free, no waiting putter can enter: its item has no room, or it is not its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any, NamedTuple

from pipegraph import concurrency
from pipegraph.chunk import Chunk, EndOfEpoch, Item, Token
from pipegraph.engine.activity import Activity, Cancelled, Leaving, Waiter
from pipegraph.engine.contents import Contents, Putter, Putters, Stamp
from pipegraph.engine.memory import Buffers
from pipegraph.engine.stage_worker import StagePump
from pipegraph.engine.unwanted import Unwanted


class ChannelStats(NamedTuple):
    """A snapshot of a channel. Waits are nanoseconds summed over threads, running waits included."""

    capacity: int
    depth: int
    nbytes: int
    puts: int
    gets: int
    put_wait_ns: int
    get_wait_ns: int
    putters_waiting: int
    getters_waiting: int


class Channel:
    """See the module docstring.

    Args:
        capacity: items it may hold, at least 1.
        max_bytes: bytes it may hold; None is unbounded.
        activity: counts waiting threads; one of its own if not given.
        sequenced: whether ``put_at`` will be used.
        bundle_rows: samples in one bundle, at most; 1 for a channel of other items.
        heavy_capacity: items that it may hold whatever their size; None: ``capacity``.

    Attributes:
        pump: of an inline stage, which runs in the thread that waits for its output.
        readers: threads that get from it.
        leaving: whether the calling thread is to leave instead of waiting; ``nudge_all`` makes waiting ones check it.
        changed: called under the lock after every change (for tests, which wait for states and never for time).
        on_split: called under the lock with a bundle's buffers when only a part of it is taken.
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
        self.activity = activity or Activity()
        self.pump: StagePump | None = None
        self.on_take: Callable[[int, Item], None] | None = None
        self.may_take: Callable[[int], bool] | None = None
        self.leaving: Callable[[], bool] | None = None
        self.changed: Callable[[], None] | None = None
        self.readers = 1
        self.on_split: Callable[[Buffers], None] = lambda buffers: None
        self._lock = concurrency.Lock()
        self._contents = Contents(capacity, max_bytes, sequenced, bundle_rows, heavy_capacity)
        self._unwanted = Unwanted()
        self._cancelled = False
        self._driven = False  # whether its reader steps the pump: nobody else would make room
        self._putters = Putters()
        self._getters: deque[Waiter] = deque()
        self._tickets = 0
        self._gets = 0
        self._put_wait_ns = 0
        self._get_wait_ns = 0

    # -- putting -------------------------------------------------------------------------------

    def put(self, item: Item, more: bool = False) -> bool:
        """Append; blocks while full. False if the item was discarded.

        Args:
            more: whether the caller puts another item or calls :meth:`nudge` at once: until then no getter is woken.

        Raises:
            Cancelled: the channel was cancelled.
        """
        return self._put(-1, item, False, more=more)

    def put_at(self, seq: int, item: Item, last: bool = True, stamp: Stamp | None = None) -> bool:
        """Append in the order of sequence numbers; blocks while there is no room for this one.

        Args:
            last: whether this item closes its number.
            stamp: called with the item as it is appended, under the lock, maybe in another thread.
        """
        return self._put(seq, item, last, stamp)

    def close_seq(self, seq: int) -> None:
        """No more items for this number. Never blocks."""
        with self._lock:
            self._arrived(self._contents.close(seq))
            self._let_in()

    def wait_turn(self, seq: int) -> None:
        """Blocks until every lower number is closed."""
        self._put(seq, None, False)

    def _put(
        self, seq: int, item: Item | None, last: bool, stamp: Stamp | None = None, more: bool = False
    ) -> bool:
        with self._lock:
            if self._cancelled:
                raise Cancelled
            if self._may_enter(seq, item):
                entered = self._enter(seq, item, last, stamp, more)
                if self._putters:
                    self._let_in()
                return entered
            if self._getters and self._contents.ready:
                self._wake_getter()  # for what was put with ``more``
            waiter = Putter(seq, item, last, stamp)
            self._putters.append(waiter)
            self._has_changed()
        self._wait(waiter, self._putters)
        if waiter.entered is None:
            raise Cancelled
        return waiter.entered

    def _may_enter(self, seq: int, item: Item | None) -> bool:
        if item is None:
            return self._contents.is_next(seq)
        if self._driven or self._contents.admits(seq, item):
            return True
        return self._unwanted.active and self._unwanted.left_of(item) is None

    def _enter(
        self, seq: int, item: Item | None, last: bool, stamp: Stamp | None, more: bool = False
    ) -> bool:
        if item is None:
            return True
        left = self._unwanted.left_of(item) if self._unwanted.active else item
        if stamp is not None:
            stamp(item if left is None else left)
        if left is not None:
            self._arrived(self._contents.enter(seq, left, last), more)
        elif last:
            self._arrived(self._contents.close(seq))
        return left is not None

    def _arrived(self, items: Iterable[Item], more: bool = False) -> None:
        """Items have become ready."""
        for item in items:
            if self._unwanted.active and isinstance(item, EndOfEpoch):
                # Not earlier: until now an item of the epoch, with another number, may still have been on its way.
                self._unwanted.ended(item.epoch)
            if self._getters and not more:
                self._wake_getter()
        if self.changed is not None:
            self.changed()

    def _let_in(self) -> None:
        """Let all putters enter that can, after more room, a new next number, or fewer wanted items."""
        while self._putters and (first := self._putters.first(self._may_enter)) is not None:
            first.entered = self._enter(first.seq, first.item, first.last, first.stamp)
            first.wake(self.activity)
            self._putters.remove(first)
            self._has_changed()

    # -- getting -------------------------------------------------------------------------------

    def get(self) -> Item:
        """The next item; blocks while there is none."""
        item: Item = self.take()[1]
        return item

    def take(self, rows: int | None = None, other_work: Callable[[], bool] | None = None) -> tuple[int, Any]:
        """``(ticket, item)``, blocking while there is none. Tickets number the calls 0, 1, 2 ..., in item order, across
        threads.

        Args:
            rows: maximum number of samples to take from a bundle; the rest stays.
            other_work: whether there is other work for the caller, checked first and after a ``nudge_all``; the result
                is then ``(-1, None)``.
        """
        while True:
            pump = None
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if other_work is not None and other_work():
                    return -1, None
                ticket, ready, may = self._tickets, self._contents.ready, self.may_take
                if ready and (may is None or may(ticket)):
                    return self._pop(rows)
                if not ready and self.pump is not None and self.pump.try_enter():
                    pump = self.pump
                else:
                    if self.leaving is not None and self.leaving():
                        raise Leaving
                    waiter = Waiter(perf_counter_ns())
                    self._getters.append(waiter)
                    self._has_changed()
            if pump is not None:
                self._drive(pump)
                continue
            self._wait(waiter, self._getters)

    def _drive(self, pump: StagePump) -> None:
        self._driven = True
        try:
            pump.step()
        finally:
            self._driven = False
            pump.leave()

    def take_ahead(self, rows: int | None = None) -> tuple[int, Item] | None:
        """As :meth:`take`, for a thread with an item still in work; None if there is no item to spare. Never waits.

        There is one to spare while the channel holds ``rows`` samples for each reader. Tokens are not taken: their turn
        comes after the item in work.
        """
        pump = self.pump
        if pump is not None and pump.more and not self._contents.ready and pump.try_enter():
            if pump.more:
                self._drive(pump)
            else:
                pump.leave()
        with self._lock:
            ready, may = self._contents.ready, self.may_take
            if self._cancelled or not ready or not isinstance(ready[0], Chunk):
                return None
            if pump is None and self._contents.waiting()[0] < self.readers * (rows or 1):
                return None
            return self._pop(rows) if may is None or may(self._tickets) else None

    def _pop(self, rows: int | None) -> tuple[int, Item]:
        ticket = self._tickets
        item = self._contents.pop(rows, self.on_split, self.readers > 1)
        self._gets += item.count
        self._tickets += 1
        if self.on_take is not None:
            self.on_take(ticket, item)
        if self._putters:
            self._let_in()
        if self._getters and self._contents.ready:
            self._wake_getter()  # it may wait for the reorder window, or for the rest of a bundle
        if self.changed is not None:
            self.changed()
        return ticket, item

    def peek(self) -> None:
        """Blocks until there is an item, and does not take it."""
        self.take(other_work=lambda: bool(self._contents.ready))

    def waiting(self) -> tuple[int, Token | None]:
        """How many chunks can be taken without waiting, and the token after them, if there is one."""
        with self._lock:
            return self._contents.waiting()

    def nudge(self) -> None:
        """Wake one waiting getter, to check again."""
        with self._lock:
            if self._getters:
                self._wake_getter()
                self._has_changed()

    def nudge_all(self) -> None:
        """Wake every waiting getter, to check again."""
        with self._lock:
            while self._getters:
                self._wake_getter()
            self._has_changed()

    # -- waiting -------------------------------------------------------------------------------

    def _wake_getter(self) -> None:
        self._getters[0].wake(self.activity)
        self._getters.popleft()

    def _wait(self, waiter: Waiter, queue: deque[Any]) -> None:
        try:
            waiter.wait(self.activity)
        except BaseException:
            # Interrupted (Ctrl-C). A getter that was woken already passes the wake on.
            with self._lock:
                if waiter in queue:
                    queue.remove(waiter)
                    self.activity.resume()
                elif queue and queue is self._getters:
                    self._wake_getter()
                self._let_in()
                self._has_changed()
            raise
        waited = perf_counter_ns() - waiter.since_ns
        with self._lock:
            if queue is self._putters:
                self._put_wait_ns += waited
            else:
                self._get_wait_ns += waited

    def _has_changed(self) -> None:
        if self.changed is not None:
            self.changed()

    # -- control -------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Raise ``Cancelled`` in all threads that wait here, now or later; held items are dropped."""
        with self._lock:
            self._cancelled = True
            self._contents.clear()
            for waiter in (*self._putters, *self._getters):
                waiter.wake(self.activity)
            self._putters.clear()
            self._getters.clear()
            self._has_changed()

    def discard(self, epoch: int) -> list[Chunk]:
        """Refuse chunks of ``epoch`` (or earlier) from now on; returns those it held."""
        with self._lock:
            self._unwanted.discard(epoch)
            dropped = self._contents.take_out(epoch)
            self._let_in()
            self._has_changed()
            return dropped

    def discards(self, epoch: int) -> bool:
        """Whether chunks of ``epoch`` are refused."""
        with self._lock:
            return epoch <= self._unwanted.discarded

    def skip(self, epoch: int, seen: Callable[[Chunk], bool]) -> None:
        """Leave out the chunks of ``epoch`` for which ``seen`` is true: they were delivered before the run began."""
        with self._lock:
            self._unwanted.skip(epoch, seen)

    def full(self) -> bool:
        """Whether the item that must come next waits for room."""
        with self._lock:
            return self._putters.blocked(self._contents.is_next) is not None

    def grow(self) -> int:
        """Parks' rule: make room for the item that must come next. Returns the new capacity."""
        with self._lock:
            item = self._putters.blocked(self._contents.is_next)
            if item is not None:
                self._contents.grow(item)
                self._let_in()
                self._has_changed()
            return self._contents.capacity

    def resize(self, capacity: int) -> None:
        """Set the capacity; items held already stay."""
        with self._lock:
            self._contents.resize(capacity)
            self._let_in()
            self._has_changed()

    # -- looking -------------------------------------------------------------------------------

    def look(self, now_ns: int | None = None) -> ChannelStats:
        """As :meth:`stats`, under the lock."""
        now = perf_counter_ns() if now_ns is None else now_ns
        return ChannelStats(
            capacity=self._contents.capacity,
            depth=self._contents.held,
            nbytes=self._contents.nbytes,
            puts=self._gets + self._contents.held,
            gets=self._gets,
            put_wait_ns=self._put_wait_ns + sum(max(0, now - waiter.since_ns) for waiter in self._putters),
            get_wait_ns=self._get_wait_ns + sum(max(0, now - waiter.since_ns) for waiter in self._getters),
            putters_waiting=len(self._putters),
            getters_waiting=len(self._getters),
        )

    def stats(self, now_ns: int | None = None) -> ChannelStats:
        """A consistent snapshot; waits that still run count up to ``now_ns``, by default now."""
        with self._lock:
            return self.look(now_ns)
