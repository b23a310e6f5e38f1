"""The stop event of a pipeline, usable by threads that wait on something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Stopping(threading.Event):
    """Set when a pipeline stops. Thread-safe.

    Who cannot wait on it, since it waits for a store or a lock, leaves a call that ends that wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # of `_ends`: the calls of those who are inside `ending`
        self._ends: list[Callable[[], None]] = []

    def set(self) -> None:
        """Stop; what ends the waits under way is called here, in this thread."""
        super().set()
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
