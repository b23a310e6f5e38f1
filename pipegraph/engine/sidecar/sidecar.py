"""The sidecar, as seen by the trainer: its host, the proxy of what runs in it, and the loop that receives its chunks.

One thread of the trainer calls (``start_run``, ``next``), as it would call any worker process. Requests of other
threads (to cancel a run, or for the profile) use a separate control connection, which a thread of the sidecar serves.

The next items are asked for before those of the last answer are passed on, unless their pass has yet to begin.

Each answer also brings reports of the sidecar's stages for states. They are recorded before the chunks that follow them
are passed on, so that taking a state needs no call.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from pipegraph import concurrency
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.contracts import Context
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.contents import samples_in
from pipegraph.engine.process import surroundings
from pipegraph.engine.process.process_host import ProcessHost
from pipegraph.engine.process.processes import Processes
from pipegraph.engine.remote.base_proxy import Remote
from pipegraph.engine.remote.contract import GRACE_S, Died
from pipegraph.engine.stage.failure_notes import log_first
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage.unit import settle
from pipegraph.engine.stage_worker import Worker
from pipegraph.errors import WorkerDiedError, note
from pipegraph.planning.plan import Plan

ANSWER_S = 1.0
"""Seconds to wait for the answer to a control request."""


class CloseErrors(Exception):
    """What the trainer warns of once the sidecar has closed its operators."""


class SidecarHost(ProcessHost):
    """A process with a second connection, for any thread."""

    entry = "pipegraph.engine.sidecar.serving:main"

    def __init__(self, processes: Processes, plan: Plan, facts: tuple[int, ...], context: Context) -> None:
        operators = [(stage.name, stage.operator) for stage in plan.running]
        sealed = processes.seal(plan, operators, "leave out isolate=True")
        super().__init__(processes.parent, sealed, [context], [facts], None)
        self._control: Connection | None = None
        self._telling = concurrency.Lock()  # for whole messages; not held for answers
        self._asking = concurrency.Lock()  # one question at a time
        self._question = 0

    def _start(self) -> None:
        """As the base class's, with a new control connection."""
        self._end_control()
        ours, theirs = surroundings.socket_pair()
        self._control = Connection(ours.detach())
        self.extra = (theirs.fileno(),)
        try:
            with self._contexts[0].stopping.ending(self._tell_stop):
                super()._start()
        finally:
            theirs.close()
            self.extra = ()

    def close(self, grace_s: float = GRACE_S) -> None:
        try:
            super().close(grace_s)
        finally:
            self._end_control()

    def request(self, name: str, *args: Any) -> None:
        """Send a call to which :meth:`answer` is the answer."""
        self._send((name, args))

    def answer(self) -> Any:
        """The answer to the oldest request; blocks until it comes."""
        try:
            return self._result(None)
        except Died as died:
            if (error := died.__cause__) is None:
                raise
            note(error, "isolate=True: what the process has sent cannot be received")
            raise error from None

    def _end_control(self) -> None:
        with self._telling:
            control, self._control = self._control, None
            if control is not None:
                control.close()

    def _tell_stop(self) -> None:
        self.tell("stop")

    def tell(self, *message: Any) -> Connection | None:
        """Send a control message; None if the process has ended. Thread-safe."""
        with self._telling:
            try:
                if self._control is not None:
                    self._control.send(message)
            except OSError:
                return None
            return self._control

    def ask(self, what: str, *args: Any) -> Any:
        """The answer to a control request; None if there is none in time. Thread-safe."""
        with self._asking:
            self._question += 1
            control = self.tell("ask", self._question, what, *args)
            try:
                while control is not None and control.poll(ANSWER_S):
                    number, answer = control.recv()
                    if number == self._question:
                        return answer
            except (OSError, EOFError, TypeError, ValueError):  # closed meanwhile, or the process has died
                pass
        return None


class Sidecar(Remote):
    """The proxy of all that runs in the sidecar: a remote source, which sends chunks as they are to leave.

    Attributes:
        number: of the current run.
    """

    _host: SidecarHost
    group = 1
    number = 0

    def begin_run(self, epoch: int, history: Any) -> None:
        """Does nothing: the sidecar notifies its own sources."""

    def cancel(self) -> None:
        """End the sidecar's current run, and a call that waits here."""
        self._host.tell("cancel", self.number)
        super().cancel()

    def ask(self, what: str, *args: Any) -> Any:
        """See :meth:`SidecarHost.ask`."""
        return self._host.ask(what, *args)

    def _blame(self, died: Died) -> WorkerDiedError:
        error = WorkerDiedError(f"isolate=True: the process that runs the stages {died.reason}")
        if died.stack:
            error.add_note(f"pipegraph: it stood at\n{died.stack}")
        return error

    def _ask_for_items(self, run: Any, stage: StageRun) -> None:
        self._host.request("next", stage.stop_epoch, run.horizon.limit, run.horizon.begun)

    def loop(self, stage: StageRun, worker: Worker) -> Iterator[bool]:
        """The loop of the only worker."""
        run: Any = stage.run  # an IsolatedRun
        self.number = run.number
        if run.stopping.is_set():  # cancelled before the sidecar knew its number: cancel it there too
            raise Cancelled
        try:
            self._host.call("start_run", run.number, *run.start())
            epoch = run.first_epoch
            asked = False
            while True:
                if not asked:
                    run.horizon.wait_for(epoch, run.reads_ahead)
                    self._ask_for_items(run, stage)
                items, reported, error = self._host.answer()
                record(run, reported)
                if error is not None:
                    raise error.error()
                if not items:
                    raise Cancelled
                for item in items:
                    if item.__class__ is EndOfEpoch:
                        epoch = item.epoch + 1
                asked = run.horizon.allows(epoch, run.reads_ahead)
                if asked:  # the next answer comes while the trainer uses this one
                    self._ask_for_items(run, stage)
                for item in items:
                    if isinstance(item, Chunk):
                        worker.meter.items += samples_in(item)
                        settle(stage, worker, (), item)
                    elif item.__class__ is Failure:
                        carried: Any = item.error
                        item.error = carried.error()
                    stage.sender.send(0, item)
                del items, item
                yield False
        except Died as died:
            run.fail(self._blame(died))
            raise Cancelled from None
        except Exception as error:
            run.fail(error)  # its notes name the stage
            raise Cancelled from None


def record(run: Any, reported: list[tuple[Any, ...]]) -> None:
    """Enter the reports of the sidecar's stages into the trainer's ledger and snapshots."""
    for what, *about in reported:
        if what == "failed":
            if lost := run.ledger.add(*about):
                log_first(run.judges(about[0]), lost)
        else:
            name, *snapshot = about
            run.snapshots[name].add(*snapshot)
