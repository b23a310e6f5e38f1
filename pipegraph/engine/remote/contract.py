"""The contract of backends: the link to a running child, and the two ways in which a child can fail.

In the stage's thread a proxy (``base_proxy``) takes the operator's place and calls its ``host``, which starts children
and ends them; in the child a ``ProcessWorker`` has the operator and serves the calls. Everything else (tickets, order,
memory account, policies, ledger, cursors, states) stays in the trainer and is not affected. A child is a process or a
Ray actor.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from pipegraph import concurrency

GRACE_S = 3.0
"""Seconds for a worker to close its operator; less than the grace of the loader's own ``close``."""

NOTHING = -1
"""The number of the row in work while there is none."""


class Call:
    """A call of a ``ProcessWorker``'s method. Sent once, and again if it was lost with a child; answered once.

    Attributes:
        outcome: the result and the error with which it was answered; None before.
    """

    __slots__ = ("args", "name", "outcome", "sent")

    def __init__(self, name: str, *args: object) -> None:
        self.name, self.args = name, args
        self.sent = False
        self.outcome: tuple[object, BaseException | None] | None = None


@dataclass(eq=False)
class Died(Exception):
    """The worker ended during a call.

    Attributes:
        reason: text that follows "the worker's process".
        row: the row in work; negative if there was none: it ended between two calls, or before its first.
        stack: Python's stack, if the worker could still write it (a segmentation fault), else "".
        pid: of a process.
        status: its exit status, negative for a signal; None if unknown.
    """

    reason: str
    row: int
    stack: str
    pid: int | None = None
    status: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.reason)  # what a traceback shows, also of a ``replace``d one


@dataclass(eq=False)
class Overdue(Exception):
    """A row took longer than the stage's timeout; its worker was ended.

    Attributes:
        row: the row in work.
        stack: Python's stack at the deadline.
    """

    row: int
    stack: str


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
        alone: whether a call must wait for the answers to those before it.
        holds: whether (part of) an answer was read already, for which ``answers`` need not be readable.
    """

    pid: int | None = None
    answers: int
    ended: int | None = None
    gone: tuple[type[Exception], ...] = (EOFError, BrokenPipeError, ConnectionResetError)
    alone = False
    holds = False

    @abstractmethod
    def send(self, message: object, wait: bool = True) -> object:
        """Send a message; without ``wait`` its rest may be sent by ``receive``."""

    @abstractmethod
    def receive(self) -> Any:
        """The next answer: the result, and what the operator has counted by name.

        Raises:
            Unreadable: it cannot be unpickled.
        """

    @abstractmethod
    def look(self) -> tuple[int, float]:
        """``(row in work, seconds since its start)``."""

    @abstractmethod
    def overdue(self, row: int) -> Overdue:
        """End a child whose row takes too long; it says where it stands."""

    @abstractmethod
    def died(self, why: Exception | None) -> Died:
        """Clean up after a child that has ended; ``why`` is the exception that said so, if one did."""

    @abstractmethod
    def kill(self) -> None:
        """End the child, whatever it does, and clean up."""


class Flag:
    """A flag whose descriptor is readable while it is set. Thread-safe; without effect while not open."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()  # keeps the sockets open during a write
        self._ends: tuple[socket.socket, ...] = ()

    def open(self) -> None:
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def set(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            for end in self._ends[1:]:
                end.send(b"x")

    def clear(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            for end in self._ends[:1]:
                end.recv(1 << 16)

    def close(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, ()
        for end in ends:
            end.close()

    def forked(self) -> None:
        """In a forked child, where another thread may have held the lock."""
        self._lock = concurrency.Lock()
        self.close()


def exit_reason(status: int | None) -> str:
    """An exit status as text.

    >>> exit_reason(-9)
    'was killed by SIGKILL (by the kernel where memory ran out, or by somebody)'
    >>> exit_reason(3)
    'called exit(3)'
    """
    if status is None:
        return "ended with the process that starts the others, which somebody killed"
    if status >= 0:
        return f"called exit({status})"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hints = {
        "SIGKILL": " (by the kernel where memory ran out, or by somebody)",
        "SIGSEGV": " (a fault in native code)",
        "SIGBUS": " (a file that shrank while it was mapped, or no memory)",
        "SIGABRT": " (native code gave up)",
    }
    return f"was killed by {name}{hints.get(name, '')}"


def stopped_s(slept_s: float, asked_s: float) -> float:
    """Seconds of a wait during which the whole job was stopped (Ctrl-Z, a paused container): these make no row late.

    Args:
        slept_s: how long the wait took. If far longer than its timeout, the job was stopped; a busy machine delays it
            less.
        asked_s: its timeout.
    """
    return slept_s if slept_s > 2 * asked_s + 1 else 0.0
