"""The interface of a host: one per worker of a remote stage; and the two ways in which it can fail.

In the stage's thread a proxy (``base_proxy``) takes the operator's place and calls its host; on the other side a
``ProcessWorker`` has the operator and serves the calls. Everything else (tickets, order, memory account, policies,
ledger, cursors, states) stays in the trainer and is not affected. Hosts are a process (``process_host``), a Ray actor
(``actors.actor_host``) and a thread under a deadline (``deadline_host``).
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeVar

from pipegraph.contracts import Context

GRACE_S = 3.0
"""Seconds for a worker to close its operator; less than the grace of the loader's own ``close``."""

STARTS = 3
"""How often to start a worker that dies before it has opened the operator."""

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


class HostState(Enum):
    """The worker of a host that starts workers anew."""

    CLOSED = "never started, or closed"
    ABSENT = "there is no worker: the next call starts one"
    SERVING = "there is a worker"


class AheadState(Enum):
    """The call sent ahead of its turn."""

    NONE = "there is none"
    SENT = "it is not answered yet"
    ANSWERED = "it was answered before its turn"


ALLOWED: Mapping[Enum, tuple[Enum, ...]] = {
    HostState.CLOSED: (HostState.ABSENT,),
    HostState.ABSENT: (HostState.SERVING, HostState.CLOSED),
    HostState.SERVING: (HostState.ABSENT,),
    AheadState.NONE: (AheadState.SENT,),
    AheadState.SENT: (
        AheadState.ANSWERED,
        AheadState.NONE,
    ),  # NONE: called, cancelled, or lost with the worker
    AheadState.ANSWERED: (AheadState.NONE,),
}
"""From each state, those that may follow."""

_State = TypeVar("_State", bound=Enum)


def moved(state: _State, to: _State) -> _State:
    """``to``, which must be allowed to follow ``state``, unless it is the same."""
    assert to is state or to in ALLOWED[state], f"{state} cannot become {to}"
    return to


class WorkerHost(ABC):
    """Base class of hosts whose workers may die and are started anew; one thread changes its states.

    Args:
        context: its ``stopping`` cancels a start.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = HostState.CLOSED
        self._ahead = AheadState.NONE
        self.ahead: Callable[[], Call | None] | None = None
        self.deaths = 0

    def start(self) -> None:
        """See :class:`Host`."""
        if self._state is HostState.CLOSED:
            self._prepare()
            self._state = HostState.ABSENT
        ends = 0
        while ends < STARTS:
            try:
                with self._context.stopping.ending(self.cancel):
                    return self._start()
            except Died as died:
                last = died
                ends += self._is_own(died)
        raise replace(last, reason=f"{last.reason}, each time that it was started", row=NOTHING, member=0)

    def _prepare(self) -> None:  # noqa: B027
        """Make what lives until the host is closed."""

    def _is_own(self, died: Died) -> bool:
        """Whether an end during a start counts as the worker's own."""
        return True

    @abstractmethod
    def _start(self) -> None:
        """Start a worker and open the operator in it."""

    @abstractmethod
    def cancel(self) -> None:
        """See :class:`Host`."""


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
