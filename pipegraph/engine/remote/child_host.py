"""The host of a child: a worker outside the trainer, which may die and is then started anew.

A backend says what is its own by two things: :meth:`ChildHost._live` starts a child, and its :class:`Link` carries
messages to it. Behaviour contract (what differs from this is a bug):

* One thread calls; ``cancel`` may be called by any thread at any moment, and ends a waiting call with ``Cancelled``.
  The answer to such a call is dropped: before the next call, or never read.
* A death is noticed as it happens, not by a timeout: the call raises :class:`Died`, with the reason and the row in
  work. The next call starts a new child, which opens the operator again.
* When a row passes its deadline the child is asked for its stack and ended, and the call raises :class:`Overdue`.
* One more call may be sent ``ahead``, before the one in work is answered. It belongs to the caller's next ``call`` with
  the identical first argument and equal others; answers to calls in between are not mistaken for its answer.
  If the child ends before the call's turn, the call is sent again and nothing of it is blamed.
* A call in ``hurried`` that is not answered soon is answered with the items that are finished, even while the function
  that makes the next one waits.
* ``close`` gives the child ``grace_s`` to close its operator, then ends it, even in the middle of an item.

Waiting is one ``poll`` on three descriptors: the answer, the child's end, and cancellation.
"""

from __future__ import annotations

import contextlib
import math
import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

from pipegraph import concurrency, forks
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.remote.contract import GRACE_S, NOTHING, Call, Died, Overdue, same_call, stopped_s
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.link import Flag, Link, Unreadable
from pipegraph.engine.remote.worker import HURRY_MS

STARTS = 3
"""How often to start a child that dies before it has opened the operator."""


class HostState(Enum):
    """The child of a host."""

    CLOSED = "never started, or closed"
    ABSENT = "there is no child: the next call starts one"
    SERVING = "there is a child"


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
    ),  # NONE: called, cancelled, or lost with the child
    AheadState.ANSWERED: (AheadState.NONE,),
}
"""From each state, those that may follow."""

_State = TypeVar("_State", bound=Enum)


def moved(state: _State, to: _State) -> _State:
    """``to``, which must be allowed to follow ``state``, unless it is the same."""
    assert to is state or to in ALLOWED[state], f"{state} cannot become {to}"
    return to


class ChildHost(ABC):
    """A :class:`~.contract.Host`; see the module docstring.

    Args:
        contexts: of the fused stages, notified of what their operators count; a stop cancels a start.
        opening: the first message to each child, which it answers when it has opened the operators.
        timeout_s: limit for one row; None: no limit.
    """

    place: str
    gave_up: str
    hurried: frozenset[str] = frozenset()
    """Calls that may be answered with the items that are finished."""

    def __init__(self, contexts: Sequence[Context], opening: Any, timeout_s: float | None) -> None:
        self._contexts = contexts
        self._opening = opening
        self._timeout_s = timeout_s
        self._state = HostState.CLOSED
        self._running: Link | None = None
        self._unanswered = 0
        self._wake = Flag()  # open from the first start to the end
        self._ahead = AheadState.NONE
        self._next: Call = ()  # the call sent ahead, if there is one
        self._outcome: tuple[Any, Exception | None] = None, None  # its result, once it was answered
        self.ahead: Callable[[], Call | None] | None = None
        self.deaths = 0
        forks.notify(self)

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.pid

    @property
    def _link(self) -> Link:
        assert self._running is not None
        return self._running

    # -- starting ------------------------------------------------------------------------------

    @abstractmethod
    def _live(self, wake: int) -> Link:
        """Start a child; what waits in it ends with ``Cancelled`` as soon as ``wake`` is readable.

        Raises:
            Died: it cannot be started.
        """

    def start(self) -> None:
        if self._state is HostState.CLOSED:
            self._wake.open()
            self._state = moved(self._state, HostState.ABSENT)
        ends = 0
        while ends < STARTS:
            try:
                with self._contexts[0].stopping.ending(self.cancel):
                    return self._start()
            except Died as died:
                last = died
                ends += self._is_own(died)
        raise replace(last, reason=f"{last.reason}, each time that it was started", row=NOTHING, member=0)

    def _is_own(self, died: Died) -> bool:
        """Whether an end during a start counts as the child's own."""
        return True

    def _start(self) -> None:
        """Start a child and open the operators in it."""
        self._running = self._live(self._wake.fileno())
        self._state = moved(self._state, HostState.SERVING)
        self._poll = select.poll()
        for fd in (self._running.answers, self._running.ended, self._wake.fileno()):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        try:
            self._send(self._opening)
            self._opened()
        except BaseException:
            self._kill()
            raise

    def _opened(self) -> None:
        """Wait until the operators are open."""
        self._result(None)

    # -- calls ---------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> Any:
        called = (name, *args)
        if self._ahead is not AheadState.NONE and same_call(self._next, called):
            answered = self._ahead is AheadState.ANSWERED
            result, error = self._outcome
            self._forget_ahead()
            if error is not None:
                raise error
            if answered:
                return result
            self._look_ahead()
            return self._result(self._timeout_s)
        if self._state is not HostState.SERVING:
            self.start()
        expected = self._ahead is AheadState.SENT
        while self._unanswered > expected:  # answers to cancelled calls
            with contextlib.suppress(Exception):
                self._result(self._timeout_s)
        if self._state is not HostState.SERVING:  # the child died
            self.start()
            expected = False
        self._send((name, args))
        if expected:
            self._answer_early()
        self._look_ahead()
        return self._result(self._timeout_s, name in self.hurried)

    def _send(self, message: Any) -> None:
        try:
            self._link.send(message)
        except self._link.gone as why:
            raise self._died(why) from None
        self._unanswered += 1

    def _look_ahead(self) -> None:
        if self.ahead is None or self._link.alone or (found := self.ahead()) is None:
            return
        self._forget_ahead()
        try:
            self._link.send((found[0], found[1:]), wait=False)
        except Exception:  # the call itself will raise it
            return
        self._next, self._ahead = found, moved(self._ahead, AheadState.SENT)
        self._unanswered += 1

    def _forget_ahead(self) -> None:
        """The call sent ahead is called now, or never."""
        self._ahead = moved(self._ahead, AheadState.NONE)
        self._next, self._outcome = (), (None, None)

    def _answer_early(self) -> None:
        """Another call was made than the one sent ahead: receive and keep the latter's answer.

        Raises:
            Died: the call sent ahead was lost with the child.
        """
        try:
            self._outcome = self._result(self._timeout_s), None
        except Died as died:
            raise replace(died, row=NOTHING, member=0) from None
        except Overdue as late:  # its item's turn, and deadline, come later
            raise Died(
                "was ended: the item it had at hand took longer than it may", NOTHING, late.stack
            ) from None
        except Exception as error:
            self._outcome = None, error
        self._ahead = moved(self._ahead, AheadState.ANSWERED)

    def _result(self, timeout_s: float | None, hurry: bool = False) -> Any:
        if hurry and not self._poll.poll(HURRY_MS):
            self._link.hurry()
        self._await(timeout_s)
        try:
            self._unanswered -= 1
            result, counts = self._link.receive()
        except self._link.gone as why:
            raise self._died(why) from None
        except Unreadable as bad:
            bad.error.add_note(
                "pipegraph: what the function returned cannot be read in the trainer's process"
            )
            raise bad.error from None
        except BaseException:  # Ctrl-C inside a message: its rest would be taken for the next one
            self._kill()
            raise
        for (member, name), n in counts.items():
            self._contexts[member].count(name, n)
        if result.__class__ is Carried:
            raise result.error()
        return result

    def _await(self, timeout_s: float | None) -> None:
        """Wait until there is an answer, or until a row passes its deadline."""
        left_s = math.inf if timeout_s is None else timeout_s
        without_s = 0.0
        while True:
            asked_ns = concurrency.monotonic_ns()
            if self._ready(left_s):
                return
            assert timeout_s is not None
            without_s += stopped_s((concurrency.monotonic_ns() - asked_ns) / 1e9, left_s)
            try:
                row, spent_s, member = self._link.look()
            except self._link.gone as why:
                raise self._died(why) from None
            left_s = timeout_s - spent_s + without_s
            if left_s <= 0:
                raise self._overdue(row, member)
            left_s = max(0.001, left_s)

    def _ready(self, left_s: float) -> bool:
        """Wait until there is an answer; returns whether it came in time."""
        found = {fd for fd, _ in self._poll.poll(None if left_s == math.inf else left_s * 1000)}
        if self._wake.fileno() in found:
            self._forget_ahead()
            raise Cancelled
        if self._link.answers in found:
            return True
        if found:
            raise self._died(None)
        return False

    # -- its end -------------------------------------------------------------------------------

    def _died(self, why: Exception | None) -> Died:
        try:
            died = self._link.died(why)
        finally:
            self._forget()
        self.deaths += 1
        return died

    def _overdue(self, row: int, member: int) -> Overdue:
        stack = self._link.stack()
        self._kill()
        return Overdue(row, stack, member=member)

    def _kill(self) -> None:
        if self._running is not None:
            try:
                self._running.kill()
            finally:
                self._forget()

    def _forget(self) -> None:
        """There is no child any more; a later call starts another."""
        if self._running is not None:
            self._state = moved(self._state, HostState.ABSENT)
        self._running = None
        self._unanswered = 0
        if self._ahead is AheadState.SENT:  # lost with the child
            self._forget_ahead()

    def _forked(self) -> None:
        """In a forked child: close our copies of what the parent's child would wait for."""
        self._wake.forked()
        if self._running is not None:
            self._running.forget()
        self._forget()
        self._state = HostState.CLOSED

    def cancel(self) -> None:
        self._wake.set()

    def uncancel(self) -> None:
        self._wake.clear()

    def close(self, grace_s: float = GRACE_S) -> None:
        if self._state is HostState.CLOSED:
            return
        error: BaseException | None = None
        try:
            if self._running is not None and grace_s:
                error = self._close_operator(self._running, grace_s)
        finally:
            self._kill()
            self._wake.close()
            self._state = moved(self._state, HostState.CLOSED)
        if error is not None:
            raise error

    def _close_operator(self, link: Link, grace_s: float) -> BaseException | None:
        self._poll.unregister(self._wake.fileno())
        deadline = concurrency.monotonic() + grace_s
        result: Any = None
        try:
            closing = False
            while self._unanswered or not closing:
                if not self._unanswered:
                    link.send(("close", ()))
                    self._unanswered, closing = 1, True
                ready = self._poll.poll(max(0.0, deadline - concurrency.monotonic()) * 1000)
                if link.answers not in [fd for fd, _ in ready]:
                    return None  # it has died, or is in the middle of a long item, which is not needed
                self._unanswered -= 1
                with contextlib.suppress(Unreadable):
                    result, _ = link.receive()
        except link.gone:
            return None  # it had died already
        return result.error() if isinstance(result, Carried) else None
