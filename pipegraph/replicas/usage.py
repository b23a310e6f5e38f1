"""One caller at a time, in the process that built the executor, until it is closed.

Calls and `no_sync` are ``with`` statements on plain locks: Ctrl-C cannot come between taking one and the promise to
give it back, as it can in a context manager written in Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pipegraph import concurrency
from pipegraph.errors import ReplicaError

_IN_USE = "the executor is in use: one call at a time, and none from inside a forward or loss"


class Usage:
    """The lock is held by the thread `_caller` from the beginning to the end of each call, and while closing.

    Attributes:
        closed: why nothing may be called any more.
        torn: a call has begun, and has not reached its end: it runs, or was interrupted.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._apart = concurrency.Lock()
        self._caller: int | None = None
        self._process = os.getpid()
        self.closed: str | None = None
        self.torn = False

    @property
    def here(self) -> bool:
        """Whether this is the process that built the executor, and has its threads."""
        return os.getpid() == self._process

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return self._lock.locked()

    @property
    def syncing(self) -> bool:
        """Whether gradients are reduced: not inside :meth:`no_sync`."""
        return not self._apart.locked()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Inside, gradients are only accumulated."""
        return self._apart if self.syncing else nullcontext()

    def entered(self) -> AbstractContextManager[Any]:
        """To be held during a call, which :meth:`began` then begins.

        Raises:
            ReplicaError: closed, in use, or in a forked child.
        """
        if not self.here:
            raise ReplicaError(
                "the executor belongs to another process: a forked child has none of its threads; build one there"
            )
        self.refuse_closed()
        if self.busy:
            raise ReplicaError(_IN_USE)
        return self._lock

    def began(self) -> None:
        """This thread holds the lock for a call; raises ReplicaError if the executor was closed meanwhile."""
        self._caller = concurrency.get_ident()
        self.refuse_closed()

    def refuse_closed(self) -> None:
        """Raises ReplicaError once the executor is closed."""
        if self.closed is not None:
            raise ReplicaError(f"the executor is closed: {self.closed}")

    def closing(self, members: Iterable[concurrency.Thread]) -> AbstractContextManager[Any]:
        """To be held while closing: waits for the call that runs in another thread.

        Raises:
            ReplicaError: this thread makes that call, or works for it: it would wait for itself.
        """
        if self.busy and (self._caller == concurrency.get_ident() or concurrency.current_thread() in members):
            raise ReplicaError(_IN_USE)
        return self._lock
