"""A bounded, closable queue between two stages, with statistics.

Behaviour contract (what differs from this is a bug):

* It never holds more than ``capacity`` items, nor more than ``max_bytes`` bytes, except that an
  empty one admits one item of any size. The samples of a bundle count one by one.
* ``put`` appends; ``put_at(lane, ...)`` appends in the order of lanes (see ``reorder``), for
  stages with several workers. Items of later lanes wait inside, within the same bound, and always
  leave room for one item (bundle) of the lane that is next: the head of the line can never be locked out.
* Waiting takes no time slices and no timeouts: a waiter is queued under the channel's lock and woken
  by whoever makes its condition true. ``cancel`` wakes everybody with ``Cancelled``.
* A put returns False for a chunk that is not wanted: of a discarded epoch, or delivered before a restart.

All state changes under ``_lock``. Lock order: channel, then activity or watermark; never two channels.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch, Mark
from pipegraph.engine.activity import Activity, Cancelled, Waiter
from pipegraph.engine.reorder import ReorderBuffer

LIGHT_BYTES = 1 << 20
"""Beyond a ``few`` items a channel holds more only while all are lighter than this together."""


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
        lanes: whether ``put_at`` will be used.
        most: samples in one bundle; 1 for a channel of other items. At most ``capacity``.
        few: items that it holds of any weight; None: as many as ``capacity``.
    """

    def __init__(
        self,
        capacity: int,
        max_bytes: int | None = None,
        activity: Activity | None = None,
        lanes: bool = False,
        most: int = 1,
        few: int | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.activity = activity or Activity()
        self.pump: Pump | None = None
        self.on_take: Callable[[int, Any], None] | None = None
        self.may_take: Callable[[int], bool] | None = None
        self._lock = threading.Lock()
        self._ready: deque[Any] = deque()
        self._reorder: ReorderBuffer[Any] | None = ReorderBuffer() if lanes else None
        self._capacity = capacity
        self._most = most
        self._few = capacity if few is None else few
        self._extra = 0  # samples of the bundles inside, but one of each
        # 0 sends every put through the slow path, where filters are looked at and samples counted
        self._room = capacity if most == 1 else 0
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._cancelled = False
        self._discarded = -1
        self._skip: tuple[int, Callable[[Any], bool]] | None = None
        self._putters: deque[Waiter] = deque()
        self._getters: deque[Waiter] = deque()
        self._watchers: list[tuple[Callable[[ChannelStats], bool], threading.Lock]] = []
        self._put_hooks = False  # somebody must be told of a put
        self._get_hooks = most > 1  # somebody must be told of a get
        self._taken = 0
        self._put_wait_ns = 0
        self._get_wait_ns = 0
        self._grown = 0

    # -- putting -------------------------------------------------------------------------------

    def put(self, item: Any) -> bool:
        """Append; blocks while full. False if the item was discarded.

        Raises:
            Cancelled: the channel was cancelled.
        """
        with self._lock:
            if len(self._ready) < self._room and not item.nbytes:
                self._ready.append(item)
                if self._put_hooks:
                    self._after_put()
                return True
        return self._put(-1, item, False, None)

    def put_at(self, lane: int, item: Any, last: bool = True) -> bool:
        """Append in the order of lanes; blocks while there is no room for this lane."""
        return self._put(lane, item, last, None)

    def put_stamped(self, lane: int, item: Any, stamp: Callable[[Any], None]) -> bool:
        """Append to a lane that stays open; ``stamp(item)`` runs at the very moment, under the lock."""
        return self._put(lane, item, False, stamp)

    def close_lane(self, lane: int) -> None:
        """No more items for this lane. Never blocks."""
        assert self._reorder is not None
        with self._lock:
            self._release(self._reorder.close(lane))

    def wait_turn(self, lane: int) -> None:
        """Blocks until every lower lane is closed."""
        reorder = self._reorder
        assert reorder is not None
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if reorder.next >= lane:
                    return
                waiter = self._queue_putter(lane, None)
            self._wait(waiter, self._putters)

    def at_head(self, lane: int) -> bool:
        """Whether every lower lane is closed. Without the lock: once true it stays so."""
        assert self._reorder is not None
        return self._reorder.next >= lane

    def _held(self) -> int:
        return len(self._ready) + self._extra + (self._reorder.held if self._reorder is not None else 0)

    def _admits(self, lane: int, nbytes: int, samples: int) -> bool:
        after, reorder = self._held() + samples, self._reorder
        weight = self._nbytes + nbytes
        room = self._capacity if weight <= LIGHT_BYTES else self._few
        if reorder is not None and lane > reorder.next:
            fits = self._max_bytes is None or weight <= self._max_bytes
            return after <= room - self._most and fits
        if not self._ready and after <= self._capacity:
            return True
        return after <= room and (self._max_bytes is None or weight <= self._max_bytes)

    def _put(self, lane: int, item: Any, last: bool, stamp: Callable[[Any], None] | None) -> bool:
        samples = len(item.lineages) if item.__class__ is Bundle else 1
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if self._room == 0 and self._dropped(item):
                    if stamp is not None:
                        stamp(item)
                    if lane >= 0 and last:
                        assert self._reorder is not None
                        self._release(self._reorder.close(lane))
                    return False
                if self._admits(lane, item.nbytes, samples):
                    if stamp is not None:
                        stamp(item)
                    self._nbytes += item.nbytes
                    self._extra += samples - 1
                    if self._reorder is None:
                        self._append(item)
                    else:
                        self._release(self._reorder.add(lane, item, last))
                    return True
                waiter = self._queue_putter(lane, item.nbytes)
            self._wait(waiter, self._putters)

    def _release(self, items: list[Any]) -> None:
        """Items have come to the head of the line, or the head has moved on."""
        for item in items:
            self._append(item)
        if self._putters:
            self._wake_putter()
            self._set_hooks()

    def _append(self, item: Any) -> None:
        if self._room == 0 and item.__class__ is EndOfEpoch:
            self._lift_filters(item.epoch)
        self._ready.append(item)
        if self._put_hooks:
            self._after_put()

    def _lift_filters(self, epoch: int) -> None:
        """Everything of ``epoch`` is in; only now: in another lane an item of it may still have been on its way."""
        if self._skip is not None and epoch >= self._skip[0]:
            self._skip = None
        if epoch >= self._discarded and self._skip is None and self._most == 1:
            self._room = self._capacity

    def _after_put(self) -> None:
        if self._getters:
            self._getters.popleft().wake(self.activity)
        self._set_hooks()

    def _dropped(self, item: Any) -> bool:
        """Whether a filter takes this item out."""
        if isinstance(item, Chunk):
            if item.epoch <= self._discarded:
                return True
            if self._skip is not None and item.epoch == self._skip[0] and self._skip[1](item):
                return True
        elif isinstance(item, EndOfEpoch):
            return False
        elif item.epoch <= self._discarded:
            return True
        elif self._skip is not None and isinstance(item, Mark) and item.epoch == self._skip[0]:
            return self._skip[1](item)
        return False

    # -- getting -------------------------------------------------------------------------------

    def get(self) -> Any:
        """The next item; blocks while there is none."""
        with self._lock:
            if self._ready:
                item = self._ready.popleft()
                self._taken += 1
                if item.nbytes:
                    self._nbytes -= item.nbytes
                if self._get_hooks:
                    self._after_get(item)
                return item
        return self._get()[1]

    def peek(self) -> None:
        """Blocks until there is an item, and leaves it."""
        self._get(lambda: bool(self._ready))

    def ahead(self) -> tuple[int, Any]:
        """How many chunks can be got at once, and the token behind them, if one is there."""
        with self._lock:
            for count, item in enumerate(self._ready):
                if not isinstance(item, Chunk):
                    return count, item
            return len(self._ready), None

    def take(self, elsewhere: Callable[[], bool] | None = None) -> tuple[int, Any]:
        """``(ticket, item)``: items in order, tickets 0, 1, 2 ... in order, to any number of threads.

        Where ``elsewhere()`` says (after a ``nudge_all``) that there is other work, ``(-1, None)``.
        """
        return self._get(elsewhere)

    def _get(self, elsewhere: Callable[[], bool] | None = None) -> tuple[int, Any]:
        while True:
            pump = None
            waiter = None
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if elsewhere is not None and elsewhere():
                    return -1, None
                ticket = self._taken
                if self.may_take is not None and not self.may_take(ticket):
                    waiter = self._queue_getter()
                elif self._ready:
                    item = self._ready.popleft()
                    self._taken += 1
                    self._nbytes -= item.nbytes
                    if self.on_take is not None:
                        self.on_take(ticket, item)
                    if self._get_hooks:
                        self._after_get(item)
                    if self._ready and self.may_take is not None and self._getters:
                        self._wake_getter()  # it may have waited for the window and not for an item
                        self._set_hooks()
                    return ticket, item
                elif self.pump is not None and self.pump.try_enter():
                    pump = self.pump
                else:
                    waiter = self._queue_getter()
            if pump is not None:
                try:
                    pump.step()
                finally:
                    pump.leave()
            elif waiter is not None:
                self._wait(waiter, self._getters)

    def _after_get(self, item: Any) -> None:
        if item.__class__ is Bundle:
            self._extra -= len(item.lineages) - 1
        if self._putters:
            self._wake_putter()
        self._set_hooks()

    def nudge(self) -> None:
        """Let one waiting getter look again."""
        with self._lock:
            if self._getters:
                self._getters.popleft().wake(self.activity)
                self._set_hooks()

    def nudge_all(self) -> None:
        """Let every waiting getter look again."""
        with self._lock:
            while self._getters:
                self._getters.popleft().wake(self.activity)
            self._set_hooks()

    # -- waiting -------------------------------------------------------------------------------

    def _queue_putter(self, lane: int, nbytes: int | None) -> Waiter:
        waiter = Waiter(perf_counter_ns(), lane, nbytes)
        self._putters.append(waiter)
        self._set_hooks()
        return waiter

    def _queue_getter(self) -> Waiter:
        waiter = Waiter(perf_counter_ns())
        self._getters.append(waiter)
        self._set_hooks()
        return waiter

    def _wake_putter(self) -> None:
        """Wake the waiting putter whose lane comes first: it is the one that can be admitted."""
        if self._reorder is None:
            self._putters.popleft().wake(self.activity)
            return
        first = self._first_putter()
        self._putters.remove(first)
        first.wake(self.activity)

    def _first_putter(self) -> Waiter:
        return min(self._putters, key=lambda waiter: waiter.lane)

    def _wait(self, waiter: Waiter, queue: deque[Waiter]) -> None:
        try:
            waiter.wait(self.activity)
        except BaseException:
            # Interrupted (Ctrl-C). If the wake came already it belongs to somebody else now.
            with self._lock:
                if waiter in queue:
                    queue.remove(waiter)
                    self.activity.resume()
                elif queue:
                    (self._wake_putter if queue is self._putters else self._wake_getter)()
                self._set_hooks()
            raise
        waited = perf_counter_ns() - waiter.since_ns
        with self._lock:
            if queue is self._putters:
                self._put_wait_ns += waited
            else:
                self._get_wait_ns += waited

    def _wake_getter(self) -> None:
        self._getters.popleft().wake(self.activity)

    def _set_hooks(self) -> None:
        watched = bool(self._watchers)
        if watched:
            self._tell_watchers()
            watched = bool(self._watchers)
        self._put_hooks = watched or bool(self._getters)
        self._get_hooks = watched or bool(self._putters) or self._most > 1

    # -- control -------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Everybody who waits here, now or later, gets ``Cancelled``; held items are dropped."""
        with self._lock:
            self._cancelled = True
            self._ready.clear()
            if self._reorder is not None:
                self._reorder = ReorderBuffer()
            self._nbytes = self._extra = 0
            self._room = 0
            for waiter in (*self._putters, *self._getters):
                waiter.wake(self.activity)
            self._putters.clear()
            self._getters.clear()
            self._set_hooks()

    def discard(self, epoch: int) -> list[Chunk]:
        """Nobody wants chunks of ``epoch`` (or earlier) any more; returns those it held."""
        with self._lock:
            self._discarded = max(epoch, self._discarded)
            self._room = 0
            dropped = [item for item in self._ready if isinstance(item, Chunk) and item.epoch <= epoch]
            if dropped:
                self._ready = deque(i for i in self._ready if not (isinstance(i, Chunk) and i.epoch <= epoch))
                self._nbytes -= sum(item.nbytes for item in dropped)
                self._extra -= sum(len(item.lineages) - 1 for item in dropped if item.__class__ is Bundle)
            for waiter in self._putters:
                waiter.wake(self.activity)
            self._putters.clear()
            self._set_hooks()
            return dropped

    def discards(self, epoch: int) -> bool:
        """Whether chunks of ``epoch`` are refused."""
        with self._lock:
            return epoch <= self._discarded

    def skip(self, epoch: int, seen: Callable[[Any], bool]) -> None:
        """Take out the chunks of ``epoch`` for which ``seen`` is true: they were delivered before.

        Called before the run; several filters of one epoch add up.
        """
        with self._lock:
            before = self._skip
            if before is None:
                self._skip = (epoch, seen)
            else:
                first = before[1]
                self._skip = (epoch, lambda item: first(item) or seen(item))
            self._room = 0

    def full(self) -> bool:
        """Whether the item that must come next waits for room."""
        with self._lock:
            return self._blocked() is not None

    def _blocked(self) -> Waiter | None:
        if not self._putters:
            return None
        first = self._first_putter()
        at_head = self._reorder is None or first.lane <= self._reorder.next
        return first if first.nbytes is not None and at_head else None

    def grow(self) -> int:
        """Parks' rule: room for the one item that must come next. Returns the new capacity."""
        with self._lock:
            waiter = self._blocked()
            if waiter is None:
                return self._capacity
            assert waiter.nbytes is not None
            held = self._held()
            if held + self._most > self._capacity:
                self._capacity = held + self._most
            self._few = max(self._few, self._capacity)
            if self._max_bytes is not None:
                self._max_bytes = max(self._max_bytes, self._nbytes + waiter.nbytes)
            self._grown += 1
            if self._room:
                self._room = self._capacity
            self._putters.remove(waiter)
            waiter.wake(self.activity)
            self._set_hooks()
            return self._capacity

    # -- looking -------------------------------------------------------------------------------

    def _stats(self, now_ns: int | None = None) -> ChannelStats:
        now = perf_counter_ns() if now_ns is None else now_ns
        depth = self._held()
        return ChannelStats(
            capacity=self._capacity,
            depth=depth,
            nbytes=self._nbytes,
            puts=self._taken + depth - self._extra,
            gets=self._taken,
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
        told = threading.Lock()
        told.acquire()
        with self._lock:
            if condition(self._stats()):
                return
            self._watchers.append((condition, told))
            self._set_hooks()
        told.acquire()

    def _tell_watchers(self) -> None:
        stats = self._stats()
        for watcher in list(self._watchers):
            if watcher[0](stats):
                self._watchers.remove(watcher)
                watcher[1].release()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<Channel {stats.depth}/{stats.capacity}>"
