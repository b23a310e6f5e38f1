"""The threads that wait to put an item into a channel. Guarded by the channel's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from time import perf_counter_ns

from pipegraph.chunk import Item
from pipegraph.engine.activity import Waiter

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
