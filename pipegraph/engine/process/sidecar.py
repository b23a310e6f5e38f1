"""The sidecar, as seen by the trainer: the process in which ``loader(isolate=True)`` runs the host's part of a plan.

One thread of the trainer calls (``start_run``, ``next``), through a :class:`~.process_host.ProcessHost` like that of
any worker. Requests from other threads (to cancel a run, or for the profile) use a separate ``control`` connection,
which a thread of the sidecar serves.
"""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import Any

from pipegraph import concurrency
from pipegraph.contracts import Context
from pipegraph.engine.process import zygote
from pipegraph.engine.process.contract import Died
from pipegraph.engine.process.process_host import GRACE_S, ProcessHost
from pipegraph.engine.process.sealed import Sealed
from pipegraph.errors import WorkerDiedError

ENTRY = "pipegraph.engine.sidecar_process:main"

ANSWER_S = 1.0
"""Seconds to wait for the answer to a control request."""


class _Host(ProcessHost):
    """A worker process with a second socket."""

    entry = ENTRY
    hurried = frozenset()

    def __init__(self, parent: zygote.Zygote, sealed: Sealed, facts: Any) -> None:
        super().__init__(parent, sealed, Context(""), facts, None, lambda member, name, n: None)
        self.control: Connection | None = None

    def _start(self) -> None:
        """As the base class's, with a new control connection."""
        self.end_control()
        ours, theirs = socket.socketpair()
        self.control = Connection(ours.detach())
        self.extra = (theirs.fileno(),)
        try:
            super()._start()
        finally:
            theirs.close()
            self.extra = ()

    def end_control(self) -> None:
        control, self.control = self.control, None
        if control is not None:
            control.close()


class Sidecar:
    """The operator of the ``Elsewhere`` stage's only worker, whose loop is ``stage.sidecar_loop``.

    ``facts`` are ``(memory limit, seed, rank, world size)``.
    """

    kind = "source"
    group = 1

    def __init__(self, parent: zygote.Zygote, sealed: Sealed, facts: tuple[int, int, int, int]) -> None:
        self._host = _Host(parent, sealed, facts)
        self._sending = (
            concurrency.Lock()
        )  # for whole messages on the control connection; not held for answers
        self._asking = concurrency.Lock()  # one request at a time
        self._question = 0
        self.number = 0
        """The number of its current run."""

    @property
    def pid(self) -> int | None:
        return self._host.pid

    def open(self, context: Context) -> None:
        """Start the process, and the workers in it."""
        self._host._context = context  # its ``stopping`` cancels a start
        try:
            with context.stopping.ending(self._stop):
                self._host.start()
        except Died as died:
            self.close(0)
            raise blame(died) from None
        except BaseException:
            self.close(0)
            raise

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the process and its child processes; idempotent."""
        try:
            self._host.close(grace_s)
        finally:
            with self._sending:
                self._host.end_control()

    def begin_run(self, epoch: int, history: Any) -> None:
        """Does nothing: the sidecar notifies its own sources."""

    # -- calls, from one thread ----------------------------------------------------------------

    def start_run(self, *args: Any) -> None:
        self._host.call("start_run", self.number, *args)

    def next(self, stop: int, horizon: float, begun: float) -> Any:
        return self._host.call("next", stop, horizon, begun)

    # -- thread-safe ---------------------------------------------------------------------------

    def cancel(self) -> None:
        """End the sidecar's current run, and a call that waits here."""
        self._send("cancel", self.number)
        self._host.cancel()

    def uncancel(self) -> None:
        self._host.uncancel()

    def _stop(self) -> None:
        self._send("stop")
        self._host.cancel()

    def ask(self, what: str, *args: Any) -> Any:
        """The answer to a control request; None if there is none in time."""
        with self._asking:
            self._question += 1
            control = self._send("ask", self._question, what, *args)
            try:
                while control is not None and control.poll(ANSWER_S):
                    number, answer = control.recv()
                    if number == self._question:
                        return answer
            except (OSError, EOFError, TypeError, ValueError):  # closed meanwhile, or the process has died
                pass
        return None

    def _send(self, *message: Any) -> Connection | None:
        with self._sending:
            control = self._host.control
            if control is None:
                return None
            try:
                control.send(message)
            except OSError:
                return None
            return control


def blame(died: Died) -> WorkerDiedError:
    """The error for the death of the sidecar."""
    error = WorkerDiedError(f"isolate=True: the process that runs the stages {died.reason}")
    if died.stack:
        error.add_note(f"pipegraph: it stood at\n{died.stack}")
    return error
