"""A bounded memo for values that an epoch computes once, so that orders stay frozen values without state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from pipegraph.forks import lock_free_after_fork

T = TypeVar("T")


class BoundedMemo(Generic[T]):
    """Least recently used values, bounded by bytes; thread-safe.

    The last two values are kept whatever their size: the running epoch's, and
    that of the next one, which prefetching draws at the same time. Computing
    happens outside the lock; of two threads that miss the same key at once
    both compute, and the first result is kept.

    Args:
        max_bytes: the bytes that values beyond the last two may fill.
        size_of: the bytes that one value holds.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._lock = lock_free_after_fork()
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._held = 0

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value under ``key``, computed if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = compute()
        with self._lock:
            if key in self._values:
                return self._values[key]
            self._values[key] = value
            self._held += self._size_of(value)
            while len(self._values) > 2 and self._held > self._max_bytes:
                _, dropped = self._values.popitem(last=False)
                self._held -= self._size_of(dropped)
        return value

    def __len__(self) -> int:
        with self._lock:
            return len(self._values)
