"""The contents of a channel: items in order, within its bounds. Pure; guarded by the channel's lock.

And the line of the threads whose items had no room (``Putters``).

Invariant: ``held`` and ``nbytes`` count the samples and bytes in ``ready`` (less the first ``offset`` samples of its
first bundle, which were taken) and in ``reorder``, where items wait for a lower sequence number. A failure counts as
none: an inline stage sends one and then the end of its epoch before its only reader, which drives it, can make room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from time import perf_counter_ns

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Failure, Item, Token
from pipegraph.engine.activity import Waiter
from pipegraph.engine.memory import Buffers
from pipegraph.engine.reorder import ReorderBuffer

LIGHT_BYTES = 2 << 20
"""A channel holds more than ``heavy_capacity`` items only while their bytes together do not exceed this."""


class Contents:
    """See the module docstring; the arguments are those of ``Channel``.

    Attributes:
        ready: items whose turn it is, which may be taken.
        offset: samples already taken from the first of them, a bundle.
        reorder: items that wait for a lower sequence number; None if items have no numbers.
        highest: the largest capacity so far. Items of later numbers were admitted when there was that much room, and
            the item of the next number must still fit.
        grown: the capacity that the last ``grow`` set.
    """

    __slots__ = (
        *("bundle_rows", "capacity", "grown", "heavy_capacity", "held", "highest", "max_bytes", "nbytes"),
        *("offset", "ready", "reorder"),
    )  # fmt: skip

    def __init__(
        self,
        capacity: int,
        max_bytes: int | None,
        sequenced: bool,
        bundle_rows: int,
        heavy_capacity: int | None,
    ) -> None:
        self.capacity = capacity
        self.heavy_capacity = capacity if heavy_capacity is None else heavy_capacity
        self.highest = capacity
        self.grown = 1
        self.max_bytes = max_bytes
        self.bundle_rows = bundle_rows
        self.ready: deque[Item] = deque()
        self.offset = 0
        self.reorder: ReorderBuffer[Item] | None = ReorderBuffer() if sequenced else None
        self.held = 0
        self.nbytes = 0

    def is_next(self, seq: int) -> bool:
        """Whether all lower numbers are closed."""
        return self.reorder is None or seq <= self.reorder.next

    def admits(self, seq: int, item: Item) -> bool:
        """Whether there is room for an item; items of later numbers leave room for a bundle of the next number."""
        after = self.held + item.count
        nbytes = self.nbytes + item.nbytes
        room = self.capacity if nbytes <= LIGHT_BYTES else self.heavy_capacity
        fits = self.max_bytes is None or nbytes <= self.max_bytes
        if self.reorder is not None and seq > self.reorder.next:
            return after <= room - self.bundle_rows and fits
        return (after <= room and fits) or (not self.ready and after <= self.highest)

    def enter(self, seq: int, item: Item, last: bool) -> Sequence[Item]:
        """Add an item; returns the items that became ready."""
        self.nbytes += item.nbytes
        self.held += item.count
        if self.reorder is None:
            self.ready.append(item)
            return (item,)
        released = self.reorder.add(seq, item, last)
        self.ready += released
        return released

    def close(self, seq: int) -> Sequence[Item]:
        """No more items for this number; returns the items that became ready."""
        if self.reorder is None:
            return ()
        released = self.reorder.close(seq)
        self.ready += released
        return released

    def pop(self, rows: int | None, share: Callable[[Buffers], None], evenly: bool = False) -> Item:
        """Take the first item, or at most ``rows`` of its samples.

        Args:
            share: called with the buffers of a bundle of which a part is left.
            evenly: whether to split a bundle into equal parts: 64 rows split into 55 and 9 would keep one of two
                workers idle.
        """
        item = self.ready[0]
        if not isinstance(item, Bundle):
            self.held -= item.count
            self.nbytes -= item.nbytes
            return self.ready.popleft()
        offset, count = self.offset, item.count
        left = count - offset
        taken = left if rows is None or rows >= left else rows
        if evenly and taken < left:
            parts = -(-left // taken)
            taken = -(-left // parts)
        if taken == left:
            self.ready.popleft()
            self.offset = 0
            if offset:
                item = item.share(offset, count)
        else:
            self.offset = offset + taken
            if item.buffers:
                share(item.buffers)
            item = item.share(offset, offset + taken)
        self.held -= taken
        self.nbytes -= item.nbytes
        return item

    def waiting(self) -> tuple[int, Token | None]:
        """How many chunks can be taken without waiting, and the token after them, if there is one."""
        chunks = -self.offset
        for item in self.ready:
            if not isinstance(item, Chunk):
                return chunks, item
            chunks += item.count
        return chunks, None

    def take_out(self, epoch: int) -> list[Chunk]:
        """Remove the ready chunks and failures of ``epoch`` or earlier; returns the chunks."""
        gone = [item for item in self.ready if isinstance(item, Chunk | Failure) and item.epoch <= epoch]
        if not gone:
            return []
        first = self.ready[0]
        self.ready = deque(
            item for item in self.ready if not (isinstance(item, Chunk | Failure) and item.epoch <= epoch)
        )
        dropped = [item for item in gone if isinstance(item, Chunk)]
        if self.offset and dropped and first is dropped[0]:
            assert isinstance(first, Bundle)
            dropped[0] = first.share(self.offset, first.count)
            self.offset = 0
        self.nbytes -= sum(item.nbytes for item in dropped)
        self.held -= sum(item.count for item in dropped)
        return dropped

    def clear(self) -> None:
        """Drop everything."""
        self.ready.clear()
        if self.reorder is not None:
            self.reorder = ReorderBuffer()
        self.nbytes = self.held = self.offset = 0

    def grow(self, item: Item) -> None:
        """Enlarge the bounds so that ``item`` fits."""
        self.capacity = max(self.capacity, self.held + max(item.count, self.bundle_rows))
        self.grown = self.highest = self.capacity
        self.heavy_capacity = max(self.heavy_capacity, self.capacity)
        if self.max_bytes is not None:
            self.max_bytes = max(self.max_bytes, self.nbytes + item.nbytes)

    def resize(self, capacity: int) -> None:
        """Set the capacity, not below what ``grow`` has set; that of heavy items follows. Items held already stay."""
        capacity = max(capacity, self.grown)
        self.heavy_capacity = max(1, self.heavy_capacity * capacity // self.capacity)
        self.capacity = capacity
        self.highest = max(self.highest, capacity)


Stamp = Callable[[Item], None]
_seq = attrgetter("seq")


class Putter(Waiter):
    """A thread that waits to put an item.

    Attributes:
        item: the item that needs room; None if the thread waits only for its turn.
        entered: the result of its ``put``; None until it may continue, and if it was cancelled.
    """

    __slots__ = ("entered", "item", "last", "seq", "stamp")

    def __init__(self, seq: int, item: Item | None, last: bool, stamp: Stamp | None) -> None:
        super().__init__(perf_counter_ns())
        self.seq = seq
        self.item = item
        self.last = last
        self.stamp = stamp
        self.entered: bool | None = None


class Putters(deque[Putter]):
    """In the order in which they came; they enter in the order of their numbers."""

    def first(self, may_enter: Callable[[int, Item | None], bool]) -> Putter | None:
        """The first that may enter now."""
        for waiter in sorted(self, key=_seq) if len(self) > 1 else self:
            if may_enter(waiter.seq, waiter.item):
                return waiter
            if waiter.item is not None:
                return None  # nothing overtakes it
        return None

    def blocked(self, is_next: Callable[[int], bool]) -> Item | None:
        """The item that must come next, if it waits for room."""
        first = min(self, key=_seq, default=None)
        return first.item if first is not None and is_next(first.seq) else None
