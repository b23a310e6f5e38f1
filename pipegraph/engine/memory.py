"""The memory account of one loader: counts live buffers, and makes workers wait for room.

Rules (what differs from them is a bug):

* A buffer counts once, from the moment a stage has made it until the last chunk that refers to it
  has been delivered or dropped.
* Before a worker makes an item, it *reserves* the size of the largest item of its stage so far. It
  waits while ``used + reservation`` is above its stage's ceiling: the limit less one item of every
  stage further down, so that these can always continue and make room; and less one item of its own
  stage if an earlier item of the stage is unfinished, so that the item which is next always fits.
* Of the waiting workers, the one furthest downstream is served first.
* Until a stage has made its first item, its items are estimated to be as large as the largest of the stages
  further up: otherwise these would fill the limit before it shows what it needs.
* So ``used`` exceeds the limit only by the amount by which items are larger than all that their stage finished
  before; a source's first items count as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from time import perf_counter_ns

from pipegraph import concurrency
from pipegraph.engine.activity import Activity, Cancelled, Waiter
from pipegraph.errors import MemoryLimitError
from pipegraph.units import format_bytes

Buffers = tuple[tuple[int, int], ...]
First = Callable[[int], bool]


class StageAccount:
    """The account of one stage.

    Attributes:
        depth: 0 for the stage next to the consumer, growing upstream.
        largest: the most bytes that one item has added so far (for a bundle: the average of its samples).
        call: the most bytes that one call has added; a call for a bundle makes several items.
        headroom: bytes for one call of every stage further down.
        guarded: whether workers must reserve before they make an item; False for stages whose items hold no bytes.
        reserves: whether its workers reserve what they make; true of all but regrouping stages.
        estimated: whether its sizes are estimates from stages further up, because it has not made anything yet.
        wait_ns: nanoseconds that its workers have waited for room.
    """

    __slots__ = "call depth estimated guarded headroom largest name reserves wait_ns".split()

    def __init__(self, name: str, depth: int, reserves: bool) -> None:
        self.name = name
        self.depth = depth
        self.reserves = self.estimated = reserves
        self.largest = 0
        self.call = 0
        self.headroom = 0
        self.guarded = False
        self.wait_ns = 0


class _Request:
    """A worker that waits for room. The thread that makes the room reserves it for the worker."""

    __slots__ = ("first", "granted", "reserved", "stage", "ticket", "waiter")

    def __init__(self, stage: StageAccount, first: First | None, ticket: int) -> None:
        self.stage = stage
        self.first = first
        self.ticket = ticket
        self.waiter = Waiter(perf_counter_ns())
        self.granted = False
        self.reserved = 0

    def rank(self) -> tuple[int, bool]:
        """Sort key: furthest downstream first; within a stage, the item that leaves first."""
        return self.stage.depth, self.first is not None and not self.first(self.ticket)


class Account:
    """See the module docstring. One lock; room is handed to waiters under it.

    Args:
        limit: bytes.
        activity: counts the waiting threads.

    Attributes:
        excess: the part of ``used`` that was not reserved; a buffer's part of it is removed with the buffer.
    """

    def __init__(self, limit: int, activity: Activity) -> None:
        self.limit = limit
        self.activity = activity
        self.used = 0
        self.peak = 0
        self.excess = 0
        self.stages: list[StageAccount] = []
        self._lock = concurrency.Lock()
        self._references: dict[
            int, list[int]
        ] = {}  # by identity: chunks that refer to it, bytes, those in excess
        self._waiting: list[_Request] = []
        self._cancelled = False

    def stage(self, name: str, depth: int, reserves: bool = False) -> StageAccount:
        """Open the account of a stage.

        Args:
            reserves: whether its workers reserve what they make; its sizes are then estimated at first.
        """
        stage = StageAccount(name, depth, reserves)
        self.stages.append(stage)
        return stage

    def reserve(self, stage: StageAccount, first: First | None = None, ticket: int = 0) -> int:
        """Blocks until one more item of the stage fits; returns the bytes reserved.

        ``first(ticket)`` returns whether this item is the next to leave its stage; others leave room for that one.

        Raises:
            Cancelled: the run is over.
        """
        return self.reserve_rows(stage, 1, first, ticket)[1]

    def reserve_rows(
        self, stage: StageAccount, rows: int, first: First | None = None, ticket: int = 0
    ) -> tuple[int, int]:
        """As :meth:`reserve`, for as many of ``rows`` items as fit now, at least one: ``(items, bytes)``."""
        with self._lock:
            if self._cancelled:
                raise Cancelled
            fits = min(rows, self._fitting(stage, first, ticket, rows))
            if fits > 0:
                self._use(fits * stage.largest)
                return fits, fits * stage.largest
            request = _Request(stage, first, ticket)
            self._waiting.append(request)
        try:
            request.waiter.wait(self.activity)
        except BaseException:
            with self._lock:
                if request in self._waiting:
                    self._waiting.remove(request)
                    self.activity.resume()
                elif request.granted:
                    self.used -= request.reserved
                    self._wake()
            raise
        with self._lock:
            stage.wait_ns += perf_counter_ns() - request.waiter.since_ns
        if not request.granted:
            raise Cancelled
        return 1, request.reserved

    def try_reserve(self, stage: StageAccount, rows: int, first: First | None, ticket: int) -> int | None:
        """As :meth:`reserve_rows` for all ``rows`` items, without waiting: the bytes, or None if they do not fit."""
        with self._lock:
            if self._cancelled or self._fitting(stage, first, ticket, rows) < rows:
                return None
            self._use(rows * stage.largest)
            return rows * stage.largest

    def _fitting(self, stage: StageAccount, first: First | None, ticket: int, rows: int) -> int:
        """How many of ``rows`` items fit; below 1 if none does."""
        free = self.limit - stage.headroom - self.used
        if not stage.largest:
            return rows if free >= stage.call or (free >= 0 and (first is None or first(ticket))) else 0
        fits = (free - max(stage.call, stage.largest)) // stage.largest
        if fits < 1 and free >= stage.largest and (first is None or first(ticket)):
            return 1
        return fits

    def _use(self, nbytes: int) -> None:
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used

    def settle(self, stage: StageAccount, reserved: int, old: Buffers, new: Buffers, items: int = 1) -> None:
        """A stage has made ``new`` (``items`` items) from ``old``: replace the reservation and ``old`` by ``new``.

        Raises:
            MemoryLimitError: one item alone is larger than the limit.
        """
        with self._lock:
            self.used -= reserved
            added = self._add(new)
            if stage.reserves and added > reserved:
                self._note_excess(new, added - reserved)
            self._remove(old)
            if stage.estimated:
                stage.estimated = stage.guarded = False
                stage.call = stage.largest = 0
                self._raise_headroom()
            if added > stage.largest * items:
                stage.largest = -(-added // items)
            if added > stage.call:
                if sum(nbytes for _, nbytes in new) > self.limit:
                    raise MemoryLimitError(
                        f"stage {stage.name!r}: one item of {format_bytes(sum(n for _, n in new))} is larger than "
                        f"memory_limit={format_bytes(self.limit)}; raise memory_limit or make smaller items"
                    )
                stage.call = added
                stage.guarded = True
                self._raise_headroom()
            self._wake()

    def _raise_headroom(self) -> None:
        for stage in self.stages:
            if stage.estimated:
                made = [each for each in self.stages if each.depth > stage.depth and not each.estimated]
                stage.call = max((each.call for each in made), default=0)
                stage.largest = max((each.largest for each in made), default=0)
                stage.guarded = stage.call > 0
        for stage in self.stages:
            below = sum(other.call for other in self.stages if other.depth < stage.depth)
            stage.headroom = min(below, self.limit)

    def _add(self, buffers: Buffers) -> int:
        added = 0
        references = self._references
        for identity, nbytes in buffers:
            entry = references.get(identity)
            if entry is None:
                references[identity] = [1, nbytes, 0]
                added += nbytes
            else:
                entry[0] += 1
        self._use(added)
        return added

    def _remove(self, buffers: Buffers) -> None:
        references = self._references
        for identity, _ in buffers:
            entry = references.get(identity)
            if entry is None:
                continue
            entry[0] -= 1
            if entry[0] == 0:
                del references[identity]
                self.used -= entry[1]
                self.excess -= entry[2]

    def _note_excess(self, made: Buffers, nbytes: int) -> None:
        """Record that ``nbytes`` of these buffers were not reserved."""
        self.excess += nbytes
        for identity, _ in made:
            entry = self._references[identity]
            part = min(nbytes, entry[1] - entry[2])
            entry[2] += part
            nbytes -= part
        self.excess -= nbytes  # the part of buffers that the worker has already released

    def hold(self, buffers: Buffers, times: int = 1) -> None:
        """More chunks refer to these buffers."""
        with self._lock:
            for _ in range(times):
                self._add(buffers)

    def exchange(self, old: Buffers, new: Sequence[Buffers]) -> None:
        """One chunk was split into several: replace its references by theirs."""
        with self._lock:
            excess = self.excess
            self._remove(old)
            for each in new:
                self._add(each)
            if excess > self.excess:
                self._note_excess(tuple(chain.from_iterable(new)), excess - self.excess)

    def release(self, buffers: Buffers) -> None:
        """A chunk that refers to these buffers was dropped."""
        if not buffers:
            return
        with self._lock:
            self._remove(buffers)
            self._wake()

    def keep(self, nbytes: int) -> None:
        """Count bytes kept outside of chunks, such as states of iterators; negative when they are released."""
        if nbytes:
            with self._lock:
                if not self._cancelled:
                    self._use(nbytes)
                    self._wake()

    def cancel_reservation(self, reserved: int) -> None:
        """Return a reservation for which nothing was made."""
        if reserved:
            with self._lock:
                self.used -= reserved
                self._wake()

    def nudge(self) -> None:
        """An item has left its stage, so another one is first: check the waiting workers."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if not self._waiting:
            return
        for request in sorted(self._waiting, key=_Request.rank):
            if self._fitting(request.stage, request.first, request.ticket, 1) < 1:
                break
            self._grant(request)

    def _grant(self, request: _Request) -> None:
        request.granted = True
        request.reserved = request.stage.largest
        self._use(request.reserved)
        request.waiter.wake(self.activity)
        self._waiting.remove(request)

    def waiting(self) -> list[str]:
        """The names of the stages that wait for memory, the one furthest downstream first."""
        with self._lock:
            return [request.stage.name for request in sorted(self._waiting, key=_Request.rank)]

    def admit_one(self) -> bool:
        """The pipeline is stalled: admit the waiter furthest downstream if the limit itself allows it.

        Its ceiling keeps room for items that cannot come while nothing moves. Unreserved bytes do not count here: they
        took room before the stages further down had shown what they need.
        """
        with self._lock:
            for request in sorted(self._waiting, key=_Request.rank):
                if self.used - self.excess + request.stage.largest <= self.limit:
                    self._grant(request)
                    return True
            return False

    def cancel(self) -> None:
        """Wake every waiter with ``Cancelled`` and forget all buffers."""
        with self._lock:
            self._cancelled = True
            for request in self._waiting:
                request.waiter.wake(self.activity)
            self._waiting.clear()
            self._references.clear()
            self.used = self.excess = 0
