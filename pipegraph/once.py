"""A value made at first need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pipegraph import concurrency
from pipegraph.errors import DataError, LoaderClosedError
from pipegraph.stopping import Stopping

T = TypeVar("T")


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
