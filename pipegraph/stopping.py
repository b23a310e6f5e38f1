"""The stop event of a pipeline, usable by threads that wait on something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pipegraph import concurrency


class Stopping:
    """An event that is set when a pipeline stops. Thread-safe.

    Who cannot wait on it, since it waits for a store or a lock, leaves a call that ends that wait.
    """

    def __init__(self) -> None:
        self._event = concurrency.Event()
        self.is_set = self._event.is_set
        self.wait = self._event.wait
        self._lock = concurrency.Lock()  # of `_ends`: the calls of those who are inside `ending`
        self._ends: list[Callable[[], None]] = []

    def set(self) -> None:
        """Stop; what ends the waits under way is called here, in this thread."""
        self._event.set()
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """While inside, a stop calls ``end``, which must not wait; at once where it has stopped already.

        It may be called more than once.
        """
        with self._lock:
            self._ends.append(end)
        try:
            if self.is_set():
                end()
            yield
        finally:
            with self._lock:
                self._ends.remove(end)
