"""The link to a running child: the part of a backend that carries messages. See ``child_host`` for who uses it."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from typing import Any

from pipegraph import concurrency
from pipegraph.engine.remote.contract import Died


class Unreadable(Exception):
    """A complete message that cannot be unpickled here; the connection is still usable.

    Attributes:
        error: the exception raised by unpickling.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Link(ABC):
    """A running child, as its host sees it: it does one message after another, and gives each one answer.

    Attributes:
        pid: of a process of this machine.
        answers: a descriptor that is readable while there is an answer.
        ended: one that is readable once the child has ended; None if ``receive`` says so.
        gone: the exceptions by which ``send``, ``receive`` and ``look`` say that it has ended.
        alone: whether the next call must wait for the answer to this one.
    """

    pid: int | None = None
    answers: int
    ended: int | None = None
    gone: tuple[type[Exception], ...] = (EOFError, BrokenPipeError, ConnectionResetError)
    alone = False

    @abstractmethod
    def send(self, message: Any, wait: bool = True) -> object:
        """Send a message; without ``wait`` its rest may be sent by ``receive``."""

    @abstractmethod
    def receive(self) -> Any:
        """The next answer: the result, and what the operators have counted by member and name.

        Raises:
            Unreadable: it cannot be unpickled.
        """

    def hurry(self) -> None:  # noqa: B027
        """Ask for the finished items now; only if there are ``hurried`` calls."""

    @abstractmethod
    def look(self) -> tuple[int, float, int]:
        """``(row in work, seconds since its start, number of the fused stage)``."""

    @abstractmethod
    def stack(self) -> str:
        """Python's stack in a child that is about to be ended."""

    @abstractmethod
    def died(self, why: Exception | None) -> Died:
        """Clean up after a child that has ended; ``why`` is the exception that said so, if one did."""

    @abstractmethod
    def kill(self) -> None:
        """End the child, whatever it does, and clean up."""

    @abstractmethod
    def forget(self) -> None:
        """Close what a fork has copied of the link; the child is the parent's."""


class Flag:
    """A flag whose descriptor is readable while it is set. Thread-safe; without effect while not open."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()  # keeps the descriptors open during a write
        self._ends = -1, -1

    def open(self) -> None:
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)

    def fileno(self) -> int:
        return self._ends[0]

    def set(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._ends[1] >= 0:
                os.write(self._ends[1], b"x")

    def clear(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._ends[0] >= 0:
                os.read(self._ends[0], 1 << 16)

    def close(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, (-1, -1)
        for end in ends:
            if end >= 0:
                os.close(end)

    def forked(self) -> None:
        """In a forked child, where another thread may have held the lock."""
        self._lock = concurrency.Lock()
        self.close()
