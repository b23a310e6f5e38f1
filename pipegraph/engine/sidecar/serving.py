"""The sidecar process of ``loader(isolate=True)``: runs the host's part of a plan in an ordinary runtime.

The main thread answers the trainer's calls one at a time, and is the consumer of the current run. A second thread
serves the control connection: it cancels runs, even while the main thread waits in one, and answers profile requests.
"""

from __future__ import annotations

import io
import pickle
import signal
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from time import perf_counter_ns
from typing import Any

from pipegraph import concurrency
from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Failure
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.channel import Channel
from pipegraph.engine.pass_totals import queues_of
from pipegraph.engine.process import zygote
from pipegraph.engine.process.sealed import unseal
from pipegraph.engine.process.wire import Port, TreePickler
from pipegraph.engine.remote.child import serve, write_stacks
from pipegraph.engine.remote.exceptions import Carried
from pipegraph.engine.remote.worker import OperatorCounts, Page
from pipegraph.engine.run import Run
from pipegraph.engine.runtime import Runtime
from pipegraph.engine.sidecar.sidecar import CloseErrors
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage.restore import Resume
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.errors import shown
from pipegraph.measured import Measured
from pipegraph.planning.plan import Plan
from pipegraph.totals import Totals

MAX_ITEMS = 64
"""Maximum number of items per answer: the cost of a call is shared by many small items."""

ANSWER_BYTES = 1 << 20
"""Bytes from which on no more items are added to an answer."""

Log = deque[tuple[Any, ...]]


class _ReportingLedger(Ledger):
    """Reports to the trainer's ledger, from which states are made; this one only judges budgets."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def add(self, stage: str, ordinal: int, item: Chunk, error: str) -> None:
        super().add(stage, ordinal, item, error)
        self._log.append(
            ("failed", stage, ordinal, item.replace(None), error)
        )  # the trainer logs the first one


class _ReportingSnapshots(Snapshots):
    """Reports snapshots to the trainer."""

    def __init__(self, log: Log, stage: str, first: tuple[int, Any] | None) -> None:
        super().__init__(stage)
        self.first = first
        self._log = log
        self._stage = stage

    def add(self, epoch: int, step: int, snapshot: Any) -> None:
        # A copy, at once: the iterator may change the object later.
        self._log.append(("stood", self._stage, epoch, step, pickle.loads(pickle.dumps(snapshot))))


class SidecarRuntime(Runtime):
    """A runtime that reports ledger entries and snapshots to the trainer."""

    def __init__(self, plan: Plan, facts: tuple[int, int, int, int], allocate: Callable[[int], Any]) -> None:
        super().__init__(plan, *facts)
        self.log: Log = deque()
        self.close_errors: list[str] = []
        self._allocate = allocate

    def context(self, stage: str, worker: int) -> Context:
        context = super().context(stage, worker)
        context.allocate = self._allocate
        return context

    def errors_of_close(self, stage: str, error: BaseException) -> Sequence[str]:
        self.close_errors += super().errors_of_close(stage, error)
        return ()  # the trainer warns of them

    def open(self) -> None:
        """Start the workers before the first run, so that a failed start is reported at once."""
        with self._starting:
            self._start()

    def _make_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        run = super()._make_run(epoch, horizon, resume)
        for name, stage in run.stages.items():
            stage.snapshots = _ReportingSnapshots(self.log, name, stage.snapshots.first)
        return run

    def cancel_run(self, run: Run) -> None:
        """End a run; threads that wait in it get ``Cancelled``."""
        self._cancel(run)


class _Port(Port):
    """A port whose slabs are allocated by other threads than the sender."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, back=True)
        self._slabs_lock = concurrency.Lock()  # keeps slabs from being allocated during a send

    def send(self, message: Any, wait: bool = True) -> int:
        with self._slabs_lock:
            return super().send(message, wait)

    def slab(self, nbytes: int) -> Any:
        with self._slabs_lock:
            return super().slab(nbytes)


class Serving:
    """The requests of the trainer: calls are served by the main thread, the rest by the control thread.

    ``_lock`` guards the run's number: a run is cancelled whether the request came before or after its start, and a late
    request to cancel the last one does not touch the next, which has ``_begun``.
    ``_on_the_way`` are the bytes of the last answer, which count here until the trainer, who counts them as it receives
    them, asks again.
    """

    def __init__(self, runtime: SidecarRuntime) -> None:
        self.runtime = runtime
        self._lock = concurrency.Lock()
        self._begun = self._number = 0
        self._cancelled = 0
        self._stopped = -1
        self._on_the_way = 0

    # -- calls ---------------------------------------------------------------------------------

    def start_run(
        self,
        number: int,
        epoch: int,
        horizon: float,
        resume: Resume,
    ) -> None:
        """Start run ``number`` in place of the current one."""
        runtime = self.runtime
        runtime.end_run()
        runtime.log.clear()
        self._stopped = -1
        self._on_the_way = 0
        runtime.ledger = _ReportingLedger(runtime.log)
        with self._lock:
            self._begun = number
        run = runtime.start_run(epoch, horizon, resume)
        with self._lock:
            self._number = number
            over = self._cancelled >= number
        if over:
            runtime.cancel_run(run)

    def next(self, stop: int, horizon: float, begun: float) -> tuple[list[Any], list[Any], Carried | None]:
        """The next items: ``(items, reports of stages since the last call, the error that ended the run)``.

        Without items and error the run was cancelled.

        Args:
            stop: drop the rest of this epoch and of earlier ones.
            horizon, begun: the last epoch that may be read, and the last one whose pass has begun.
        """
        run = self.runtime.run
        assert run is not None
        run.account.keep(-self._on_the_way)
        self._on_the_way = 0
        run.horizon.raise_to(horizon, begun)
        if stop > self._stopped:
            self._stopped = stop
            run.discard_output(stop)
        error = None
        items: list[Any] = []
        try:
            items = self._gather(run, run.terminal)
        except Cancelled:
            if run.error is not None:
                error = Carried(run.error)
        return items, self._reports(), error

    def instead(self, result: Any, error: Exception) -> Any:
        """An answer in place of one that cannot be sent: with failures in the place of the items that cannot."""
        if not isinstance(result, tuple) or not result[0]:
            return Carried(error)
        items, *rest = result
        sent: list[Any] = []
        for item in items:
            ones = [item.one(index) for index in range(item.count)] if isinstance(item, Bundle) else [item]
            for one in ones:
                try:
                    TreePickler(io.BytesIO(), lambda buffer: False).dump(one)
                except Exception as why:
                    why.add_note(f"pipegraph: {shown(one)} cannot be sent from the process of isolate=True")
                    failed: Any = Carried(why)
                    one = Failure(failed, one.epoch)
                sent.append(one)
        return sent, *rest

    def close(self) -> None:
        """End the runtime.

        Raises:
            CloseErrors: operators' ``close`` raised.
        """
        self.runtime.close()
        if self.runtime.close_errors:
            raise CloseErrors(*self.runtime.close_errors)

    def _gather(self, run: Run, terminal: Channel) -> list[Any]:
        found = [terminal.take(MAX_ITEMS)[1]]
        nbytes = found[0].nbytes
        while len(found) < MAX_ITEMS and nbytes <= ANSWER_BYTES and terminal.ahead() != (0, None):
            found.append(terminal.take(MAX_ITEMS)[1])
            nbytes += found[-1].nbytes
        run.account.keep(nbytes)  # first: what is released may be used at once
        self._on_the_way = nbytes
        for index, item in enumerate(found):
            if isinstance(item, Chunk):
                run.account.release(item.buffers)
                item.buffers = ()
                if item.__class__ is Chunk:
                    item.keys, item.packed = item.own_keys, None
            elif item.__class__ is Failure:
                found[index] = Failure(Carried(item.error), item.epoch)  # type: ignore[arg-type]
        return found

    def _reports(self) -> list[Any]:
        log = self.runtime.log
        return [log.popleft() for _ in range(len(log))]

    # -- the control connection ----------------------------------------------------------------

    def control(self, connection: Connection) -> None:
        """Loop of the control thread."""
        try:
            while True:
                what, *about = connection.recv()
                if what == "cancel":
                    self._cancel(*about)
                elif what == "stop":
                    self.runtime.signal_close()
                else:
                    number, question, *rest = about
                    try:
                        answer = getattr(self, question)(*rest)
                    except Exception:  # the run ended meanwhile: None stands for no answer
                        answer = None
                    connection.send((number, answer))
        except (EOFError, OSError):
            pass  # the trainer has closed the connection, or died

    def _cancel(self, number: int) -> None:
        with self._lock:
            self._cancelled = max(self._cancelled, number)
            run = self.runtime.run
            if run is not None and self._begun <= self._cancelled:
                self.runtime.cancel_run(run)

    def profile(self) -> tuple[int, Measured]:
        """The number of the run, and what the stages have counted so far, in it and before."""
        runtime = self.runtime
        with self._lock:
            run, number = runtime.run, self._number
        totals: Totals = Counter() if run is None else runtime.pass_totals.look(run, perf_counter_ns())
        queues = {} if run is None else queues_of(run)
        return number, replace(runtime.pass_totals.counted(totals), queues=queues)

    def positions(self, source: str, steps: range, epoch: int) -> list[int]:
        """The positions of a source's steps."""
        run = self.runtime.run
        return [] if run is None else list(run.positions_of(source, steps, epoch))


def main(
    sock: socket.socket, page_fd: int, stack_fd: int, control_fd: int, sealed_fd: int, *shared: int
) -> None:
    """Main function of the sidecar, called in the process that the zygote forked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_stacks(stack_fd)
    port, page = _Port(sock), Page(page_fd)
    borrowed: zygote.Zygote | None = None
    try:
        spans, facts = port.receive()
        try:
            plan: Plan = unseal(sealed_fd, spans, shared)
            if any(stage.backend.forked for stage in plan.running):
                borrowed = zygote.borrow()  # before any thread starts
            serving = Serving(SidecarRuntime(plan, facts, port.slab))
            control = Connection(control_fd)
            concurrency.Thread(target=serving.control, args=(control,), name="control", daemon=True).start()
            serving.runtime.open()
        except BaseException as error:
            port.send((Carried(error), {}))
            return
        try:
            port.send((None, {}))
            serve(port, page, serving, OperatorCounts(), serving.instead)
        finally:
            serving.runtime.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the trainer has died
    finally:
        if borrowed is not None:
            zygote.release(borrowed)
