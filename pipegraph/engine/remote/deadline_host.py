"""The host of an operator with a deadline: runs it in a thread of its own.

A thread cannot be killed. One that hangs is abandoned: its item fails with the thread's stack, a new thread with a
newly opened operator does the next item, and later results of the old thread are dropped. When its call returns, the
old thread closes its operator and ends.

The contract is that of ``host``, without deaths. Items done before the one that hangs are not repeated: they
are the trainer's own objects, and a function may have changed them.
"""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from typing import Any

from pipegraph import concurrency
from pipegraph.contracts import Context
from pipegraph.engine.remote.contract import GRACE_S, NOTHING, Died, Flag, Link, Overdue
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.worker import ProcessWorker
from pipegraph.errors import StuckWorker
from pipegraph.global_generators import enter_worker


class _Abandoned(BaseException):
    """Raised in an abandoned thread when it reaches its next row."""


class Kept(Carried):
    """An exception passed from one thread to another, itself."""

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

    def look(self) -> tuple[int, float, int]:
        """As ``Link.look``."""
        return self._row, (concurrency.monotonic_ns() - self._since) / 1e9, 0

    def abandon(self) -> int:
        """Abandon the thread; returns the row in work."""
        with self._lock:
            self._abandoned = True
            return self._row


class ThreadLink(Link):
    """A thread with its own opened operator."""

    alone = True  # it does not wait for its next call
    gone = ()

    def __init__(self, operator: Any, context: Context) -> None:
        self._operator = operator
        self._context = context
        self._progress = _Progress()
        self._worker: ProcessWorker | None = None
        self._over = False  # it has nothing more to do than to return
        self._messages: Any = concurrency.SimpleQueue()
        self._replies: list[Any] = []
        self._said = Flag()
        self._said.open()
        self.answers = self._said.fileno()
        name = f"pipegraph-deadline-{context.stage}-{context.worker}"
        self.thread = concurrency.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def send(self, message: Any, wait: bool = True) -> None:
        self._progress.begin(0)
        self._messages.put(message)

    def receive(self) -> Any:
        self._said.clear()
        return self._replies.pop(), {}

    def look(self) -> tuple[int, float, int]:
        return self._progress.look()

    def overdue(self, row: int, member: int) -> Overdue:
        stack = self.where()
        row = self._progress.abandon()  # which it may have begun since
        self.kill()
        assert self._worker is not None
        return Overdue(row, stack, self._worker.done(row))

    def died(self, why: Exception | None) -> Died:
        raise AssertionError("a thread cannot die")

    def kill(self) -> None:
        self._progress.abandon()
        self._messages.put(None)
        self._said.close()
        if self._over:
            self.thread.join()

    def where(self) -> str:
        """The thread's current stack."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _run(self) -> None:
        self._messages.get()
        enter_worker(self._context.seed, self._context.stage)
        try:
            self._worker = ProcessWorker(self._progress, self._operator, self._context, Kept)
        except BaseException as error:
            self._over = True
            self._reply(Kept(error))
            return
        self._reply(None)
        while (message := self._messages.get()) is not None:
            name, args = message
            try:
                result = getattr(self._worker, name)(*args)
                self._progress.begin(NOTHING)
            except _Abandoned:
                break
            except BaseException as error:
                result = Kept(error)
            self._over = name == "close"
            self._reply(result)
            if self._over:
                return
            del message, args, result
        self._operator.close()

    def _reply(self, result: Any) -> None:
        self._replies.append(result)
        self._said.set()


class ThreadHost(Host):
    """Starts threads; see the module docstring."""

    place = "thread"
    gave_up = "its thread was left alone"

    def __init__(self, operator: Any, context: Context, timeout_s: float) -> None:
        super().__init__([context], None, timeout_s)
        self._plain = operator
        self._links: list[ThreadLink] = []

    def _live(self, wake: int) -> ThreadLink:
        link = ThreadLink(copy.copy(self._plain), self._contexts[0])
        self._links = [link, *(each for each in self._links if each.thread.is_alive())]
        return link

    def close(self, grace_s: float = GRACE_S) -> None:
        """As the base class; warns with :class:`~pipegraph.StuckWorker` of threads that do not return."""
        try:
            super().close(grace_s)
        finally:
            self._warn()

    def _warn(self) -> None:
        left, self._links = [each for each in self._links if each.thread.is_alive()], []
        stage = self._contexts[0].stage
        for each in left:
            warnings.warn(
                f"stage {stage!r}: a thread whose item took longer than timeout={self._timeout_s:g} s "
                f"has not returned; it stands at:\n{each.where()}",
                StuckWorker,
                stacklevel=3,
            )
