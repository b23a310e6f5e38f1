"""The stop event of a pipeline, usable by threads that wait on something else; what a ``with`` block closes; and a
value made at first need, for which others wait until they are stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

from pipegraph import concurrency
from pipegraph.errors import DataError, LoaderClosedError

T = TypeVar("T")


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


class Once(Generic[T]):
    """A value made at first need, shared by all copies of an operator. Thread-safe."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._changed = concurrency.Condition()
        # Under it: at most one thread makes the value, and nobody does once it is there.
        self._value: list[T] = []
        self._is_made = False
        self._maker = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Once, (self._make,)  # a copied or pickled graph makes its own

    def get(self, stopping: Stopping | None = None, make: Callable[[], T] | None = None) -> T:
        """The value; the first caller makes it (with ``make``, so that its pipeline's stop ends that), others wait
        until they are stopped, and make it themselves if the first fails.

        Raises:
            DataError: a signal handler asks, and has interrupted its own thread in making it.
        """
        if self._value:
            return self._value[0]
        if self._is_made and self._maker == concurrency.get_ident():
            raise DataError(
                "a signal handler asks for what its own thread is just finding out about the data (which shards or "
                "files there are, and their manifest); take a state in a handler once the first pass has begun"
            )
        stopping = stopping or Stopping()
        with stopping.ending(self._wake), self._changed:
            self._changed.wait_for(lambda: not self._is_made or self._value or stopping.is_set())
            if self._value:
                return self._value[0]
            if self._is_made:
                raise LoaderClosedError("the pipeline was closed while another one looked for its shards")
            self._is_made, self._maker = True, concurrency.get_ident()
        made: list[T] = []
        try:
            made.append((make or self._make)())
        finally:
            with self._changed:
                self._value, self._is_made = made, False
                self._changed.notify_all()
        return made[0]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def peek(self) -> T | None:
        """The value if it has been made."""
        return self._value[0] if self._value else None
