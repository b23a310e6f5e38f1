"""A pure sequence-number buffer: what finishes out of order leaves in order."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Items arrive under sequence numbers 0, 1, 2 ... and are released in that order.

    Under a number there may be any number of items (also none) until it is closed; the items
    of the number that is next are released at once.

    >>> buffer = ReorderBuffer()
    >>> buffer.add(1, "b")
    []
    >>> buffer.add(0, "a")
    ['a', 'b']

    Attributes:
        next: the lowest number not yet closed.
        held: items that wait for a lower number.
    """

    __slots__ = ("_closed", "_waiting", "held", "next")

    def __init__(self) -> None:
        self.next = 0
        self.held = 0
        self._waiting: dict[int, list[T]] = {}
        self._closed: set[int] = set()

    def add(self, seq: int, item: T, last: bool = True) -> list[T]:
        """Put ``item`` under ``seq``, closing that if it is the ``last``; returns what is released."""
        if seq == self.next:
            return [item, *self._advance()] if last else [item]
        self._waiting.setdefault(seq, []).append(item)
        self.held += 1
        if last:
            self._closed.add(seq)
        return []

    def close(self, seq: int) -> list[T]:
        """No more items for ``seq``; returns what is released."""
        if seq == self.next:
            return self._advance()
        self._closed.add(seq)
        return []

    def _advance(self) -> list[T]:
        released: list[T] = []
        self.next += 1
        while True:
            items = self._waiting.pop(self.next, None)
            if items:
                released += items
                self.held -= len(items)
            if self.next not in self._closed:
                return released
            self._closed.remove(self.next)
            self.next += 1
