"""The host of one worker process, in the trainer: calls with deadlines, deaths, restarts and shutdown.

Behaviour contract (what differs from this is a bug):

* One thread calls; ``cancel`` may be called by any thread at any moment, and ends a waiting call with ``Cancelled``.
  The answer to such a call is dropped: before the next call, or never read.
* The death of a process is noticed by its sentinel, not by a timeout: the call raises :class:`Died`, with the
  reason and the row in work. The next call starts a new process, which opens the operator again.
* When a row passes its deadline the process is asked for its stack and ended, and the call raises :class:`Overdue`.
* One more call may be sent ``ahead``, before the one in work is answered. It belongs to the caller's next ``call`` with
  the identical first argument and equal others; answers to calls in between are not mistaken for its answer.
  If the process ends before the call's turn, the call is sent again and nothing of it is blamed.
* A call for the next items of a source or an expanding operator that is not answered soon is answered with those that
  are finished, even while the function that makes the next one waits.
* ``close`` gives the process ``grace_s`` to close its operator, then ends it, even in the middle of an item.

Waiting is one ``poll`` on three descriptors: the answer, the process's sentinel, and cancellation.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipegraph import concurrency, forks
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.process import zygote
from pipegraph.engine.process.sealed import Sealed
from pipegraph.engine.process.segments import anonymous_file
from pipegraph.engine.process.wire import Port, Unreadable
from pipegraph.engine.remote.contract import (
    GRACE_S,
    AheadState,
    Call,
    Died,
    HostState,
    Overdue,
    WorkerHost,
    exit_reason,
    moved,
    same_call,
    stopped_s,
)
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import HURRY_MS, NOTHING, PAGE, Page

ENTRY = "pipegraph.engine.process.worker_life:main"

END_S = 1.0
"""Seconds to wait, after a process has closed its socket, for its exit status."""

STACK_S = 1.0
"""Seconds for a hanging process to write its stack."""


@dataclass
class _Process:
    """A running process; ``stack`` is the file to which it writes its stack, ``poll`` is what a call waits on."""

    child: zygote.Child
    port: Port
    page: Page
    stack: int
    poll: select.poll


class ProcessHost(WorkerHost):
    """A :class:`~.contract.Host`; see the module docstring.

    Args:
        context: its ``stopping`` cancels a start.
        given: further data for the process.
        timeout_s: limit for one row; None: no limit.
        count: notified of what the operators count, by stage of the run.
    """

    entry = ENTRY
    """The function that runs in the process."""
    place = "process"
    gave_up = "its process was ended"
    extra: tuple[int, ...] = ()
    """Further descriptors for the process."""
    hurried = frozenset(["next", "expand", "more"])
    """Calls that may be answered with the items that are finished."""

    def __init__(
        self,
        parent: zygote.Zygote,
        sealed: Sealed,
        context: Context,
        given: Any,
        timeout_s: float | None,
        count: Callable[[int, str, int], None],
    ) -> None:
        super().__init__(context)
        self._zygote = parent
        self._sealed = sealed
        self._given = given
        self._timeout_s = timeout_s
        self._count = count
        self._wake = -1  # an eventfd, from the first start to the end
        self._waking = concurrency.Lock()  # keeps _wake open during a write
        self._running: _Process | None = None
        self._unanswered = 0
        self._next: Call = ()  # the call sent ahead, if there is one
        self._outcome: tuple[Any, Exception | None] = None, None  # its result, once it was answered
        forks.notify(self)

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.child.pid

    @property
    def _process(self) -> _Process:
        assert self._running is not None
        return self._running

    def _prepare(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _start(self) -> None:
        with contextlib.ExitStack() as undo:
            page_fd = anonymous_file(PAGE)
            undo.callback(os.close, page_fd)
            page = Page(page_fd)
            page.begin(NOTHING)
            stack = anonymous_file(0)
            undo_stack = undo.enter_context(contextlib.ExitStack())
            undo_stack.callback(os.close, stack)
            fds = [page_fd, stack, self._sealed.fd, *self.extra]
            try:
                child = self._zygote.spawn(self.entry, fds, self._wake)
            except zygote.GONE:
                raise Died(exit_reason(None), NOTHING, "") from None
            undo_stack.pop_all()
        poll = select.poll()
        for fd in (child.sock.fileno(), child.sentinel, self._wake):
            poll.register(fd, select.POLLIN)
        self._running = _Process(child, Port(child.sock), page, stack, poll)
        self._state = moved(self._state, HostState.SERVING)
        self._unanswered = 0
        self._send((self._sealed.spans, self._given))
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
        if self._state is not HostState.SERVING:  # the process died
            self.start()
            expected = False
        self._send((name, args))
        if expected:
            self._answer_early()
        self._look_ahead()
        return self._result(self._timeout_s, name in self.hurried)

    def _send(self, message: Any) -> None:
        try:
            self._process.port.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None
        self._unanswered += 1

    def _look_ahead(self) -> None:
        if self.ahead is None or (found := self.ahead()) is None:
            return
        self._forget_ahead()
        try:
            self._process.port.send((found[0], found[1:]), wait=False)
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
            Died: the call sent ahead was lost with the process.
        """
        try:
            self._outcome = self._result(self._timeout_s), None
        except Died as died:
            raise replace(died, row=NOTHING, member=0) from None
        except Overdue as late:  # its item's turn, and deadline, come later
            raise Died(self.gave_up, NOTHING, late.stack) from None
        except Exception as error:
            self._outcome = None, error
        self._ahead = moved(self._ahead, AheadState.ANSWERED)

    def _result(self, timeout_s: float | None, hurry: bool = False) -> Any:
        if hurry and not self._process.poll.poll(HURRY_MS):
            self._process.child.interrupt(signal.SIGURG)
        self._await(timeout_s)
        try:
            result, counts = self._receive()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        except Unreadable as bad:
            bad.error.add_note(
                "pipegraph: what the function returned cannot be read in the trainer's process"
            )
            raise bad.error from None
        except BaseException:  # Ctrl-C inside a message: its rest would be taken for the next one
            self._kill()
            raise
        for (member, name), n in counts.items():
            self._count(member, name, n)
        if result.__class__ is Carried:
            raise result.error()
        return result

    def _receive(self) -> Any:
        """The next answer. The worker then reads again, which makes room for the rest of the next call."""
        port, unreadable = self._process.port, None
        try:
            answer = port.receive()
        except Unreadable as bad:
            unreadable = bad
        self._unanswered -= 1
        # The wait for the next answer will notice that the process has ended.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            port.flush()
        if unreadable is not None:
            raise unreadable
        return answer

    def _await(self, timeout_s: float | None) -> None:
        # No local variable for the process: a traceback would keep its page mapped.
        sock, sentinel = self._process.child.sock.fileno(), self._process.child.sentinel
        left_ms = math.inf if timeout_s is None else timeout_s * 1000
        without_s = 0.0
        while True:
            asked_ns = concurrency.monotonic_ns()
            ready = {fd for fd, _ in self._process.poll.poll(None if left_ms == math.inf else left_ms)}
            if self._wake in ready:
                self._forget_ahead()
                raise Cancelled
            if sock in ready:
                return
            if sentinel in ready:
                raise self._died()
            assert timeout_s is not None
            row, since_ns, member = self._process.page.look()
            now_ns = concurrency.monotonic_ns()
            without_s += stopped_s((now_ns - asked_ns) / 1e9, left_ms / 1000)
            spent_s = (now_ns - since_ns) / 1e9 - without_s
            if spent_s >= timeout_s:
                raise self._overdue(row, member)
            left_ms = max(1.0, (timeout_s - spent_s) * 1000)

    def _died(self) -> Died:
        child = self._process.child
        if not child.ends_within(END_S):  # it has closed its socket but not ended
            child.kill()
            child.ends_within(math.inf)
        row, _, member = self._process.page.look()
        stack = self._read_stack()
        status = self._end()
        self.deaths += 1
        return Died(exit_reason(status), row, stack, member, child.pid, status)

    def _overdue(self, row: int, member: int) -> Overdue:
        """End a process that hangs. It first writes its stack, by a handler that runs whatever the process does."""
        self._process.child.interrupt(signal.SIGABRT)
        self._process.child.ends_within(STACK_S)
        stack = self._read_stack()
        self._kill()
        return Overdue(row, stack, member=member)

    def _read_stack(self) -> str:
        fd = self._process.stack
        nbytes = os.fstat(fd).st_size
        return os.pread(fd, min(nbytes, 1 << 16), 0).decode(errors="replace")

    def _kill(self) -> None:
        if self._running is not None:
            self._running.child.kill()
            self._end()

    def _end(self) -> int | None:
        """Clean up after an ended process; returns its exit status. A later call starts another."""
        child = self._process.child
        self._forget()
        try:
            return self._zygote.reap(child)
        finally:
            child.close()

    def _forget(self) -> None:
        if self._running is not None:
            self._running.port.close()
            os.close(self._running.stack)
            self._state = moved(self._state, HostState.ABSENT)
        self._running = None
        self._unanswered = 0
        if self._ahead is AheadState.SENT:  # lost with the process
            self._forget_ahead()

    def _forked(self) -> None:
        """In a forked child: close our copy of the parent's socket, so that the process sees the parent end."""
        self._waking = concurrency.Lock()
        running, wake, self._wake = self._running, self._wake, -1
        self._forget()
        if running is not None:
            running.child.close()
        if wake >= 0:
            os.close(wake)
        self._state = HostState.CLOSED

    # -- closing -------------------------------------------------------------------------------

    def cancel(self) -> None:
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def uncancel(self) -> None:
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.eventfd_read(self._wake)

    def close(self, grace_s: float = GRACE_S) -> None:
        if self._state is HostState.CLOSED:
            return
        error: BaseException | None = None
        try:
            if self._running is not None and grace_s:
                error = self._close_operator(grace_s)
        finally:
            self._kill()
            with self._waking:
                wake, self._wake = self._wake, -1
                os.close(wake)
            self._state = moved(self._state, HostState.CLOSED)
        if error is not None:
            raise error

    def _close_operator(self, grace_s: float) -> BaseException | None:
        process = self._process
        process.poll.unregister(self._wake)
        deadline = concurrency.monotonic() + grace_s
        try:
            closing = False
            while self._unanswered or not closing:
                if not self._unanswered:
                    process.port.send(("close", ()))
                    self._unanswered, closing = 1, True
                if not process.poll.poll(max(0.0, deadline - concurrency.monotonic()) * 1000):
                    return None  # it is in the middle of a long item, which is not needed: it is killed
                with contextlib.suppress(Unreadable):
                    result, _ = self._receive()
            return result.error() if isinstance(result, Carried) else None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return None  # it had died already
