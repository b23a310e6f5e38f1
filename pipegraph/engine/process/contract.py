"""What a backend whose operators live elsewhere must offer: one :class:`Host` per worker, and two ways for it to fail.

``remote_operator`` stands in the stage's thread in place of the operator and asks its host; on the other side a
``ProcessWorker`` holds the operator and does what is asked. Everything else (tickets, order, memory account,
policies, ledger, cursors, states) stays where it is and does not know. Hosts are a process
(``process_host``) and a thread under a deadline (``thread_host``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Call = tuple[Any, ...]
"""The name of a ``ProcessWorker``'s method, and its arguments."""


def same_call(sent: Call, called: Call) -> bool:
    """Whether a call is the one that was sent: not only an equal one, for what is compared may be arrays."""
    return sent[0] == called[0] and sent[1] is called[1] and sent[2:] == called[2:]


@dataclass(eq=False)
class Died(Exception):
    """The worker has ended in the middle of a call.

    Attributes:
        reason: in words that follow "the worker's process".
        row: that was in work; negative where none was: it ended between two calls, or before its first.
        stack: of Python, where the worker could still write it (a segmentation fault), else "".
        member: number of the stage at work, where several run in one worker.
        pid: of a process.
        status: its exit status, negative for a signal, if it is known.
    """

    reason: str
    row: int
    stack: str
    member: int = 0
    pid: int | None = None
    status: int | None = None


@dataclass(eq=False)
class Overdue(Exception):
    """A row took longer than the stage's timeout; its worker was ended, or given up.

    Attributes:
        row: that was in work.
        stack: of Python, at its deadline.
        done: what was made of the rows before it, where that is not lost.
        member: number of the stage at work, where several run in one worker.
    """

    row: int
    stack: str
    done: Sequence[Any] = ()
    member: int = 0


class Host(Protocol):
    """The trainer's side of one worker. One thread calls; ``cancel`` may come from any thread at any moment."""

    place: str
    """Where the operator is, in words: ``"process"``."""
    gave_up: str
    """What is done with a worker that hangs, in words: ``"its process was ended"``."""
    ahead: Callable[[], Call | None] | None
    """Asked, once a call is on its way, for the one that will follow, so that the worker has that at hand as it is
    done; not all hosts ask. Neither the answers nor what is blamed depend on it."""

    @property
    def pid(self) -> int | None:
        """The number of the process on this machine, if it has one."""

    def start(self) -> None:
        """Start the worker and open the operator in it.

        Raises:
            Exception: what ``open`` raised there.
            Died: it ended as it started.
            Cancelled: the trainer stops.
        """

    def call(self, name: str, *args: Any) -> Any:
        """A ``ProcessWorker``'s method ``name`` there. After a death or an overdue row the next call finds a new
        worker, with the operator opened anew.

        Raises:
            Exception: what it raised there, or of the way there or back.
            Died, Overdue: see there; no answer is lost or doubled, the caller gives the rows again.
            Cancelled: :meth:`cancel` was called; the answer is dropped whenever it comes.
        """

    def cancel(self) -> None:
        """End a call that waits, and those to come until :meth:`uncancel`. Any thread."""

    def uncancel(self) -> None:
        """Calls may wait again."""

    def close(self, grace_s: float = ...) -> None:
        """Close the operator there and end the worker, after a grace by force; idempotent.

        Raises:
            Exception: what the operator's ``close`` raised there.
        """


def exit_reason(status: int | None) -> str:
    """An exit status in words.

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
    """Seconds of a wait for which the whole job was stopped (Ctrl-Z, a paused container): no row is late for them.

    Args:
        slept_s: how long the wait took. One that took far longer than it was asked for was a stop; a busy machine
            makes it longer by less.
        asked_s: its timeout.
    """
    return slept_s if slept_s > 2 * asked_s + 1 else 0.0
