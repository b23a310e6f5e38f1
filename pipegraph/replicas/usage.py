"""One caller at a time, in the process that built the executor, until it is closed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pipegraph import concurrency
from pipegraph.errors import ReplicaError

_IN_USE = "the executor is in use: one call at a time, and none from inside a forward or loss"


class Usage:
    """The lock is held by the thread `_caller` from the beginning to the end of each call, and while closing.

    Attributes:
        closed: why nothing may be called any more.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._caller: int | None = None
        self._process = os.getpid()
        self.closed: str | None = None

    @property
    def here(self) -> bool:
        """Whether this is the process that built the executor, and has its threads."""
        return os.getpid() == self._process

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A call.

        Raises:
            ReplicaError: closed, in use, or in a forked child.
        """
        if not self.here:
            raise ReplicaError(
                "the executor belongs to another process: a forked child has none of its threads; build one there"
            )
        self._refuse_closed()
        if not self._lock.acquire(blocking=False):
            raise ReplicaError(_IN_USE)
        try:
            self._caller = concurrency.get_ident()
            self._refuse_closed()
            yield
        finally:
            self._caller = None
            self._lock.release()

    def _refuse_closed(self) -> None:
        if self.closed is not None:
            raise ReplicaError(f"the executor is closed: {self.closed}")

    @contextmanager
    def closing(self, members: Iterable[concurrency.Thread]) -> Iterator[None]:
        """Wait for the call that runs in another thread.

        Raises:
            ReplicaError: this thread makes that call, or works for it: it would wait for itself.
        """
        if self._caller == concurrency.get_ident() or (
            self._caller is not None and concurrency.current_thread() in members
        ):
            raise ReplicaError(_IN_USE)
        with self._lock:
            yield
