"""The host of one worker process: how it is started, its end and its stack. See ``host`` for the contract."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from pipegraph import concurrency, forks
from pipegraph.contracts import Context
from pipegraph.engine.process import zygote
from pipegraph.engine.process.sealed import Sealed
from pipegraph.engine.process.segments import anonymous_file
from pipegraph.engine.process.surroundings import fill_standard_descriptors
from pipegraph.engine.process.wire import Port
from pipegraph.engine.remote.contract import NOTHING, Died, Link, Overdue, Unreadable, exit_reason
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.worker import PAGE, Page

END_S = 1.0
"""Seconds to wait, after a process has closed its socket, for its exit status."""

STACK_S = 1.0
"""Seconds for a hanging process to write its stack."""


class ProcessLink(Link):
    """A running process.

    Args:
        stack: the file to which it writes its stack; owned.
        reap: its exit status, once it has ended; None if unknown.
    """

    def __init__(
        self, child: zygote.Child, page: Page, stack: int, reap: Callable[[zygote.Child], int | None]
    ) -> None:
        self.pid, self.answers, self.ended = child.pid, child.sock.fileno(), child.sentinel
        self._child = child
        self._port = Port(child.sock)
        self._page = page
        self._stack = stack
        self._reap = reap

    @property
    def holds(self) -> bool:  # type: ignore[override]
        return self._port.holds

    def send(self, message: object, wait: bool = True) -> None:
        self._port.send(message, wait)

    def receive(self) -> Any:
        try:
            result, counts = self._port.receive()
        except Unreadable:
            self._flush()
            raise
        self._flush()
        return result, counts

    def _flush(self) -> None:
        """The process reads again, which makes room for the rest of the next call."""
        # The wait for the next answer will notice that the process has ended.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._port.flush()

    def look(self) -> tuple[int, float]:
        row, since_ns = self._page.look()
        return row, (concurrency.monotonic_ns() - since_ns) / 1e9

    def overdue(self, row: int) -> Overdue:
        self._child.interrupt(signal.SIGABRT)  # a handler writes the stack, whatever the process does
        self._child.ends_within(STACK_S)
        stack = self._written()
        self.kill()
        return Overdue(row, stack)

    def _written(self) -> str:
        nbytes = os.fstat(self._stack).st_size
        return os.pread(self._stack, min(nbytes, 1 << 16), 0).decode(errors="replace")

    def died(self, why: Exception | None) -> Died:
        if not self._child.ends_within(END_S):  # it has closed its socket but not ended
            self._child.kill()
            self._child.ends_within(math.inf)
        row, _ = self._page.look()
        stack = self._written()
        status = self._end()
        return Died(exit_reason(status), row, stack, self.pid, status)

    def kill(self) -> None:
        self._child.kill()
        self._end()

    def _end(self) -> int | None:
        self._close()
        try:
            return self._reap(self._child)
        finally:
            self._child.close()

    def _close(self) -> None:
        self._port.close()
        stack, self._stack = self._stack, -1  # see Sealed.close
        if stack >= 0:
            os.close(stack)
        del self._page  # an error's traceback may keep this link, but not its memory

    def forget(self) -> None:
        self._close()
        self._child.close()


class ProcessHost(Host):
    """Starts processes by the zygote ``parent``, which get the descriptor of ``sealed`` and then ``opening``."""

    place = "process"
    gave_up = "its process was ended"

    def __init__(
        self,
        parent: zygote.Zygote,
        sealed: Sealed,
        context: Context,
        opening: Sequence[object],
        timeout_s: float | None,
    ) -> None:
        super().__init__(context, (sealed.spans, *opening), timeout_s)
        self._zygote = parent
        self._sealed = sealed
        forks.notify(self)

    def _forked(self) -> None:
        """In a forked child: close our copy of the parent's socket, so that the process sees the parent end."""
        self._wake.forked()
        if isinstance(self._running, ProcessLink):
            self._running.forget()
        self._forget()
        self._started = False

    def start(self) -> None:
        fill_standard_descriptors()  # closed since the last start
        super().start()

    def _live(self, wake: int) -> ProcessLink:
        with contextlib.ExitStack() as undo:
            page_fd = anonymous_file(PAGE)
            undo.callback(os.close, page_fd)
            page = Page(page_fd)
            page.begin(NOTHING)
            stack = anonymous_file(0)
            undo_stack = undo.enter_context(contextlib.ExitStack())
            undo_stack.callback(os.close, stack)
            try:
                child = self._zygote.spawn([page_fd, stack, *self._sealed.descriptors], wake)
            except zygote.GONE:
                raise Died(exit_reason(None), NOTHING, "") from None
            undo_stack.pop_all()
        return ProcessLink(child, page, stack, self._zygote.reap)
