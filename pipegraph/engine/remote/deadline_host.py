"""The host of an operator with a deadline: runs it in a thread of its own.

A thread cannot be killed. One that hangs is abandoned: its item fails with the thread's stack, a new thread with a
newly opened operator does the next item, and later results of the old thread are dropped. When its call returns, the
old thread closes its operator and ends.

The contract is that of ``contract.Host``, without deaths. Items done before the one that hangs are not repeated: they
are the trainer's own objects, and a function may have changed them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from pipegraph import concurrency
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.remote.contract import GRACE_S, Call, Overdue, stopped_s
from pipegraph.engine.remote.worker import NOTHING, ProcessWorker
from pipegraph.errors import StuckWorker
from pipegraph.global_generators import enter_worker


class _Abandoned(BaseException):
    """Raised in an abandoned thread when it reaches its next row."""


class Kept:
    """An exception passed from one thread to another."""

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def error(self) -> BaseException:
        return self._error


class _Progress:
    """The row in work and its start time. Rows are begun and abandoned under one lock."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._row, self._since = NOTHING, concurrency.monotonic_ns()
        self._abandoned = False

    def begin(self, row: int) -> None:
        """Begin a row; raises ``_Abandoned`` if the thread was abandoned."""
        with self._lock:
            if self._abandoned:
                raise _Abandoned
            self._row, self._since = row, concurrency.monotonic_ns()

    def left_s(self, timeout_s: float) -> float:
        """Seconds until the row's deadline."""
        return timeout_s - (concurrency.monotonic_ns() - self._since) / 1e9

    def abandon(self) -> int:
        """Abandon the thread; returns the row in work."""
        with self._lock:
            self._abandoned = True
            return self._row


class _Helper:
    """A thread with its own opened operator."""

    def __init__(self, operator: Any, context: Context) -> None:
        self.progress = _Progress()
        self.worker: ProcessWorker | None = None
        self._condition = concurrency.Condition()
        self._request: tuple[str, tuple[Any, ...]] | None = None
        self._answer: list[Any] = []
        self._cancelled = False
        self._operator = operator
        self._context = context
        name = f"pipegraph-deadline-{context.stage}-{context.worker}"
        self.thread = concurrency.Thread(target=self._run, name=name, daemon=True)
        self.busy = True  # it opens the operator

    def ask(self, name: str, args: tuple[Any, ...]) -> None:
        """Begin a call."""
        self.progress.begin(0)
        with self._condition:
            self._request, self.busy = (name, args), True
            self._condition.notify_all()

    def answer(self, timeout_s: float) -> Any:
        """The result of the call, or its exception as :class:`Kept`.

        Raises:
            Cancelled: the wait was cancelled; the call continues.
            TimeoutError: the row in work takes longer than ``timeout_s``.
        """
        without_s = 0.0
        with self._condition:
            while not self._answer:
                if self._cancelled:
                    raise Cancelled
                left_s = self.progress.left_s(timeout_s) + without_s
                if left_s <= 0:
                    raise TimeoutError
                asked_s = concurrency.monotonic()
                self._condition.wait(None if left_s == math.inf else left_s)
                without_s += stopped_s(concurrency.monotonic() - asked_s, left_s)
            self.busy = False
            return self._answer.pop()

    def set_cancelled(self, cancelled: bool) -> None:
        """Set whether waits end at once."""
        with self._condition:
            self._cancelled = cancelled
            self._condition.notify_all()

    def stack(self) -> str:
        """The thread's current stack."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _run(self) -> None:
        enter_worker(self._context.seed, self._context.stage)
        try:
            self.worker = ProcessWorker(self.progress, self._operator, self._context, Kept)
        except BaseException as error:
            self._reply(Kept(error))
            return
        self._reply(None)
        name = ""
        while name != "close":
            with self._condition:
                while self._request is None:
                    self._condition.wait()
                (name, args), self._request = self._request, None
            try:
                result = getattr(self.worker, name)(*args)
                self.progress.begin(NOTHING)
            except _Abandoned:
                self._operator.close()
                return
            except BaseException as error:
                result = Kept(error)
            del args
            self._reply(result)
            del result

    def _reply(self, result: Any) -> None:
        with self._condition:
            self._answer.append(result)
            self._condition.notify_all()


class ThreadHost:
    """See the module docstring; ``timeout_s`` is for one row."""

    pid: int | None = None
    """It has no process."""
    place = "thread"
    gave_up = "its thread was left alone"
    ahead: Callable[[], Call | None] | None = None  # not used: a thread does not wait for its next call

    def __init__(self, operator: Any, context: Context, timeout_s: float) -> None:
        self._plain = operator
        self._context = context
        self._timeout_s = timeout_s
        self._lock = concurrency.Lock()  # guards the next two, so that ``cancel`` finds the current helper
        self._helper: _Helper | None = None
        self._cancelled = False
        self._left: list[_Helper] = []

    def start(self) -> None:
        helper = _Helper(copy.copy(self._plain), self._context)
        with self._lock:
            self._helper = helper
            helper.set_cancelled(self._cancelled)
        helper.thread.start()
        with self._context.stopping.ending(self.cancel):
            self._result(math.inf)

    def call(self, name: str, *args: Any) -> Any:
        if self._helper is not None and self._helper.busy:  # still in a cancelled call
            with contextlib.suppress(Exception):
                self._result(self._timeout_s)
        if self._helper is None:
            self.start()
        assert self._helper is not None
        self._helper.ask(name, args)
        return self._result(self._timeout_s)

    def _result(self, timeout_s: float) -> Any:
        helper = self._helper
        assert helper is not None
        try:
            result = helper.answer(timeout_s)
        except TimeoutError:
            raise self._overdue(helper) from None
        if result.__class__ is Kept:
            raise result.error()
        return result

    def _overdue(self, helper: _Helper) -> Overdue:
        stack = helper.stack()
        row = helper.progress.abandon()
        assert helper.worker is not None
        done = helper.worker.done(row)
        with self._lock:
            self._helper = None
        self._left = [each for each in (*self._left, helper) if each.thread.is_alive()]
        return Overdue(row, stack, done)

    def cancel(self) -> None:
        self._set_cancelled(True)

    def uncancel(self) -> None:
        self._set_cancelled(False)

    def _set_cancelled(self, cancelled: bool) -> None:
        with self._lock:
            self._cancelled = cancelled
            helper = self._helper
        if helper is not None:
            helper.set_cancelled(cancelled)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the thread; idempotent. Warns with :class:`~pipegraph.StuckWorker` of threads that do not return.

        Raises:
            Exception: the operator's ``close`` raised it.
        """
        self.uncancel()
        with self._lock:
            helper, self._helper = self._helper, None
        error = None
        if helper is not None and helper.thread.ident is not None:
            error = self._close(helper, grace_s)
        left, self._left = [each for each in self._left if each.thread.is_alive()], []
        for each in left:
            warnings.warn(
                f"stage {self._context.stage!r}: a thread whose item took longer than timeout={self._timeout_s:g} s "
                f"has not returned; it stands at:\n{each.stack()}",
                StuckWorker,
                stacklevel=2,
            )
        if error is not None:
            raise error

    def _close(self, helper: _Helper, grace_s: float) -> BaseException | None:
        deadline = concurrency.monotonic() + grace_s
        try:
            if helper.busy:
                helper.answer(grace_s)
            if helper.worker is None:  # ``open`` failed
                return None
            helper.ask("close", ())
            result = helper.answer(max(0.0, deadline - concurrency.monotonic()))
            helper.thread.join()
        except TimeoutError:
            helper.progress.abandon()
            self._left.append(helper)
            return None
        return result.error() if isinstance(result, Kept) else None
