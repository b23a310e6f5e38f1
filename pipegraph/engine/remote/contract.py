"""The interface of a host: one per worker of a remote stage; and the two ways in which it can fail.

In the stage's thread a proxy (``base_proxy``) takes the operator's place and calls its host; on the other side a
``ProcessWorker`` has the operator and serves the calls. Everything else (tickets, order, memory account, policies,
ledger, cursors, states) stays in the trainer and is not affected. Hosts are a child that may die
(``child_host``: processes, Ray actors, the sidecar) and a thread under a deadline (``deadline_host``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

GRACE_S = 3.0
"""Seconds for a worker to close its operator; less than the grace of the loader's own ``close``."""

NOTHING = -1
"""The number of the row in work while there is none."""

Call = tuple[Any, ...]
"""The name of a ``ProcessWorker``'s method, and its arguments."""


def same_call(sent: Call, called: Call) -> bool:
    """Whether a call is the one sent; its first argument is compared by identity, for it may hold arrays."""
    return sent[0] == called[0] and sent[1] is called[1] and sent[2:] == called[2:]


@dataclass(eq=False)
class Died(Exception):
    """The worker ended during a call.

    Attributes:
        reason: text that follows "the worker's process".
        row: the row in work; negative if there was none: it ended between two calls, or before its first.
        stack: Python's stack, if the worker could still write it (a segmentation fault), else "".
        member: number of the fused stage that was at work.
        pid: of a process.
        status: its exit status, negative for a signal; None if unknown.
    """

    reason: str
    row: int
    stack: str
    member: int = 0
    pid: int | None = None
    status: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.reason)  # what a traceback shows, also of a ``replace``d one


@dataclass(eq=False)
class Overdue(Exception):
    """A row took longer than the stage's timeout; its worker was ended or abandoned.

    Attributes:
        row: the row in work.
        stack: Python's stack at the deadline.
        done: results of the rows before it, if they are not lost.
        member: number of the fused stage that was at work.
    """

    row: int
    stack: str
    done: Sequence[Any] = ()
    member: int = 0


class Host(Protocol):
    """The trainer's side of one worker. One thread calls; ``cancel`` may come from any thread at any moment."""

    place: str
    """Where the operator is, for messages: ``"process"``."""
    gave_up: str
    """What was done with a worker that hangs, for messages: ``"its process was ended"``."""
    ahead: Callable[[], Call | None] | None
    """Called after a call was sent; returns the call that will follow, so that the worker has it queued. Optional:
    neither answers nor blame depend on it."""

    @property
    def pid(self) -> int | None:
        """The process id, if the worker is a process of this machine."""

    def start(self) -> None:
        """Start the worker and open the operator in it.

        Raises:
            Exception: ``open`` raised it there.
            Died: it ended during its start.
            Cancelled: the trainer stops.
        """

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the ``ProcessWorker``. The first call after a death or an overdue row starts a new worker,
        which opens the operator again.

        Raises:
            Exception: the method raised it, or the arguments or the result could not be sent.
            Died, Overdue: see there; no answer is lost or doubled: the caller sends the rows again.
            Cancelled: :meth:`cancel` was called; the answer is dropped whenever it comes.
        """

    def cancel(self) -> None:
        """End a waiting call, and later ones until :meth:`uncancel`. Thread-safe."""

    def uncancel(self) -> None:
        """Calls may wait again."""

    def close(self, grace_s: float = ...) -> None:
        """Close the operator there and end the worker, by force after ``grace_s``; idempotent.

        Raises:
            Exception: the operator's ``close`` raised it there.
        """


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
