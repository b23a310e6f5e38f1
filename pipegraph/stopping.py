"""The stop event of a pipeline, usable by threads that wait on something else; and what a ``with`` block closes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Self

from pipegraph import concurrency


class Stopping:
    """Set when a pipeline stops. Thread-safe.

    Who cannot wait on it, since it waits for a store or a lock, leaves a call that ends that wait.

    Not an ``Event``: Ctrl-C in its ``set`` can leave its lock locked, and the next ``set`` waits for ever.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._set = False
        self._ends: list[Callable[[], None]] = []  # the calls of those who are inside `ending`

    def is_set(self) -> bool:
        """Whether the pipeline has stopped."""
        return self._set

    def set(self) -> None:
        """Stop; what ends the waits under way is called here, in this thread."""
        with self._lock:
            self._set = True
            ends = list(self._ends)
        for end in ends:
            end()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is set, at most ``timeout`` seconds; returns whether it is."""
        waiting = concurrency.Lock()
        waiting.acquire()

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # called a second time
                waiting.release()

        with self.ending(end):
            waiting.acquire(timeout=-1 if timeout is None else timeout)
        return self._set

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


class Closing:
    """Closed at the end of a ``with`` block, however that ends."""

    __slots__ = ()

    def close(self) -> None:
        """End what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
