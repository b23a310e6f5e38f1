"""A reorder buffer: items that finish out of order leave in the order of their sequence numbers. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Releases items in the order of their sequence numbers 0, 1, 2 ...

    A number may have any number of items, or none, until it is closed. Items of the next
    number are released at once.

    >>> buffer = ReorderBuffer()
    >>> buffer.add(1, "b")
    []
    >>> buffer.add(0, "a")
    ['a', 'b']

    Attributes:
        next: the lowest number not yet closed.
    """

    __slots__ = ("_closed", "_waiting", "next")

    def __init__(self) -> None:
        self.next = 0
        self._waiting: dict[int, list[T]] = {}
        self._closed: set[int] = set()

    def add(self, seq: int, item: T, last: bool = True) -> list[T]:
        """Add an item with number ``seq``, which ``last`` closes; returns the released items."""
        if seq == self.next:
            return [item, *self._advance()] if last else [item]
        self._waiting.setdefault(seq, []).append(item)
        if last:
            self._closed.add(seq)
        return []

    def close(self, seq: int) -> list[T]:
        """No more items for ``seq``; returns the released items."""
        if seq == self.next:
            return self._advance()
        self._closed.add(seq)
        return []

    def _advance(self) -> list[T]:
        released: list[T] = []
        self.next += 1
        while True:
            released += self._waiting.pop(self.next, ())
            if self.next not in self._closed:
                return released
            self._closed.remove(self.next)
            self.next += 1
