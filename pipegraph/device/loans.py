"""What is lent with an object, and comes back when that object is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from pipegraph import concurrency

T = TypeVar("T")


class _Return(weakref.ref[Any]):
    """Remembers what was lent until its owner is gone.

    Its callback is ``SimpleQueue.put`` itself: no Python code runs there, so a Ctrl-C can never arrive inside it,
    where the interpreter would print and drop it, and no lock is taken that the garbage collector could find held.
    """

    __slots__ = ("lent",)
    __hash__ = object.__hash__  # a reference's own hash asks its referent, and arrays have none
    lent: Any

    def __eq__(self, other: object) -> bool:
        return self is other


class Loans(Generic[T]):
    """What was lent and has not come back. Thread-safe."""

    def __init__(self) -> None:
        self._returned: concurrency.SimpleQueue[_Return] = concurrency.SimpleQueue()
        self._lent: set[_Return] = set()

    def lend(self, owner: Any, what: T) -> None:
        """``what`` comes back when ``owner`` is gone, and with it all that keeps it."""
        back = _Return(owner, self._returned.put)
        back.lent = what
        self._lent.add(back)

    def returned(self) -> Iterator[T]:
        """What has come back since, each once."""
        while True:
            try:
                back = self._returned.get_nowait()
            except concurrency.Empty:
                return
            self._lent.discard(back)
            yield back.lent
