"""The runtime of a loader: starts and ends its workers and runs.

Behaviour contract (what differs from this is a bug):

* A ``Runtime`` owns every thread of a loader (``worker_threads``). They start with the first run and live until
  ``close``; each worker opens its own copy of its operator once, in its own thread. Tuned stages gain and lose
  workers while passes run (``staffing``).
* A ``Run`` is the wiring for consecutive epochs: fresh channels, account and stages. A pass that
  follows the one before continues the run; any other (after a ``break``, ``set_epoch`` or
  ``load_state_dict``) cancels it, waits until every worker has left it, and starts another.
* A failure that belongs to no item goes to ``Run.fail``: the first error is kept, everything is
  cancelled, and the consumer raises it.
* When every thread of a run waits (``activity``), the thread that noticed enlarges the smallest full
  queue (Parks, "Bounded Scheduling of Process Networks", 1995), or lets the worker furthest
  down exceed its ceiling within the limit, or ends the run with the reason. It never hangs.
* ``close`` may be called from any thread at any moment. It cancels, wakes, and joins for ``GRACE_S``; a worker that
  has not returned by then is named with its stack in a ``StuckWorker`` warning and abandoned (its thread is a daemon).

Invariants, besides those of ``worker_threads``: all workers' threads are started by one call; and nothing is closed
while a thread is starting workers (it holds ``_starting``): it finds that the threads are closed, and leaves first.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency
from pipegraph.backends import BACKENDS, StageBackend
from pipegraph.contracts import Source, history_of
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.loader_context import LoaderContext
from pipegraph.engine.meter import Meter
from pipegraph.engine.pass_totals import PassTotals
from pipegraph.engine.run import Run
from pipegraph.engine.staffing import Staffing
from pipegraph.engine.stage.restore import Resume
from pipegraph.engine.stage_worker import Worker
from pipegraph.engine.worker_threads import WorkerThreads, stack_of
from pipegraph.errors import Naming, PipegraphWarning, StuckWorker, described, note
from pipegraph.global_generators import enter_worker
from pipegraph.planning.plan import Plan, StagePlan

if TYPE_CHECKING:
    from pipegraph.engine.remote.pool import Pool

GRACE_S = 5.0
"""Seconds that ``close`` waits for user code to return, and that a new pass waits before it logs for whom."""


class Runtime(LoaderContext):
    """Owns the threads of one loader. The consumer's thread calls its methods; any thread may ``close`` it."""

    def __init__(self, plan: Plan, memory_limit: int, seed: int, rank: int, world_size: int) -> None:
        super().__init__(plan, memory_limit, seed, rank, world_size)
        self.threads = WorkerThreads(plan.graph_name)
        self.staffing = Staffing(self, self.threads)
        self.pass_totals = PassTotals(self, self.staffing)
        self._pools: dict[StageBackend, Pool] = {}
        # Held by the thread that closes; a signal handler may call ``close`` again inside it.
        self._ending = concurrency.RLock()
        # Held while a thread starts workers or a run. An RLock's ``__exit__`` is C: no interrupt can skip its release.
        self._starting = concurrency.RLock()
        self._starter: concurrency.Thread | None = None  # the thread that holds it to start a run
        self._workers_started = False
        self.half_started = False  # while workers start, and if that has failed or was interrupted
        self._opened: list[tuple[str, Worker | Source]] = []  # not by workers' threads
        self._to_open: dict[str, int] = {}  # workers still to open before the first run, per stage
        self._open_error: BaseException | None = None
        self._close_errors: list[str] = []

    @property
    def run(self) -> Run | None:
        """The current run, if any."""
        return self.threads.run

    # -- runs ----------------------------------------------------------------------------------

    def start_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        """Cancel the current run, if any, and start one at ``epoch``.

        Raises:
            Cancelled: the runtime was closed.
            Exception: an operator's ``open`` raised it; a note names the stage.
        """
        self.end_run()
        with self._starting:
            self._starter = concurrency.current_thread()
            try:
                self._start()
                return self._start_run(epoch, horizon, resume)
            finally:
                self._starter = None

    def _start(self) -> None:
        with self.threads.lock:
            if self.threads.closed:
                raise Cancelled
        if not self._workers_started:
            self.half_started = True
            self._start_workers()
            self.half_started, self._workers_started = False, True

    def _start_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        for stage in self.plan.running:  # no worker is inside a run now
            for worker in self.workers[stage.name]:
                worker.operator.uncancel()
            if stage.source is not None:
                copies = [worker.operator for worker in self.workers[stage.name]]
                for source in (*copies, *filter(None, [self.readers.get(stage.name)])):
                    with Naming(stage.name, "begin_run", ", in its begin_run"):
                        source.begin_run(epoch, history_of(resume.history, stage.name))
        run = Run(self, epoch, horizon, resume)
        run.activity.attach()  # the consumer
        for stage in self.plan.running:
            if stage.backend.in_consumer:
                run.pumps(stage, self.workers[stage.name][0])
        with self.threads.lock:
            if self._open_error is not None and not self.threads.closed:  # a worker failed after the start
                raise self._open_error
            self.staffing.enter(run)
            self.threads.publish(run)
        return run

    def end_run(self) -> None:
        """Cancel the current run and wait until every worker has left it."""
        run = self.run
        if run is None:
            return
        self._cancel(run)
        if not self.threads.await_left(GRACE_S):
            return
        run.end_inline()

    def _cancel(self, run: Run) -> None:
        run.cancel()
        for workers in self.workers.values():
            for worker in workers:
                if worker.opened:
                    worker.operator.cancel()

    def _start_workers(self) -> None:
        threads = []
        for backend in BACKENDS.values():
            if backend.pool and any(stage.backend == backend for stage in self.plan.running):
                self._pools[backend] = backend.load_pool()(self.plan, self._fail)
        operators = {
            stage.name: [self.make_operator(stage, index) for index in range(stage.workers)]
            for stage in self.plan.running
        }
        for stage in self.plan.running:
            if stage.source is not None and stage.source.random_access:
                self.readers[stage.name] = copy.copy(stage.source)
        if any(stage.caches for stage in self.plan.running):
            from pipegraph.engine.stage.cache_wiring import wire_cache

            wire_cache(self.plan, operators, self.readers)
        for name, reader in self.readers.items():
            with Naming(name, "open", ": the source could not be opened"):
                reader.open(self.context(name, 0))
            self._opened.append((name, reader))
        workers: dict[str, list[Worker]] = {}
        meters: dict[str, list[Meter]] = {}
        for stage in self.plan.running:
            workers[stage.name] = [
                Worker(index, operator, Meter(stage.name, self.tracer))
                for index, operator in enumerate(operators[stage.name])
            ]
            meters[stage.name] = [worker.meter for worker in workers[stage.name]]
        for stage in self.plan.running:
            for worker in workers[stage.name]:
                if stage.backend.in_consumer:
                    self.open_operator(stage.name, worker)
                    self._opened.append((stage.name, worker))
                    continue
                life = partial(self._work, stage, worker)
                threads.append(self.threads.make(stage.name, worker.index, life))
        # One assignment each: other threads may read them at any time.
        self.workers = workers
        self.meters = meters
        self.staffing.begin()
        self._to_open = {
            stage.name: 1 if stage.backend.joins_late else stage.workers
            for stage in self.plan.running
            if not stage.backend.in_consumer
        }
        self.threads.launch(threads, lambda thread, error: self._note_open_error(error))
        self.threads.wait_until(
            lambda: not any(self._to_open.values()) or self._open_error is not None or self.threads.closed
        )
        if self._open_error is not None:
            raise self._open_error
        # A source whose `open` was cut short must not repeat its work in a run, where nothing would end it.
        if self.threads.closed:
            raise Cancelled

    def _fail(self, error: BaseException) -> None:
        """End the current run with this error, and every later one. Called by any thread."""
        with self.threads.lock:
            self._note_open_error(error)
            run = self.run
        if run is not None:
            run.fail(error)
            self._cancel(run)

    def _note_open_error(self, error: BaseException) -> None:
        """Keep the first such error, for the start or the next run to raise; under the threads' lock."""
        self._open_error = error if self._open_error is None else self._open_error
        self.threads.changed()

    def make_operator(self, stage: StagePlan, index: int) -> Any:
        if not stage.remote:
            return copy.copy(stage.operator)
        return self._pools[stage.backend].operator(stage, self.context(stage.name, index))

    def open_operator(self, stage: str, worker: Worker) -> None:
        with Naming(stage, "open", f": worker {worker.index} could not be started"):
            worker.operator.open(self.context(stage, worker.index))
        if self.tracer.ranges and not self.plan.stages[stage].remote:
            from .ranges import show_ranges

            show_ranges(worker.operator, stage, self.tracer)
        worker.opened = True

    def _work(self, stage: StagePlan, worker: Worker) -> None:
        """Body of a worker's thread."""
        worker.meter.thread_begins()
        enter_worker(self.seed, stage.name)
        if stage.backend.joins_late and worker.index and not self._wait_for_other_stages(stage.name):
            return
        try:
            self.open_operator(stage.name, worker)
        except BaseException as error:
            if isinstance(error, Cancelled):  # closed, or failed elsewhere
                return
            with self.threads.lock:
                self._note_open_error(error)
                late = None if self.threads.closed else self.run
            if late is not None:
                late.fail(error)
            return
        with self.threads.lock:
            self._to_open[stage.name] = max(0, self._to_open[stage.name] - 1)
            seen = self.threads.enter()
        try:
            self.serve(stage, worker, seen)
        finally:
            worker.meter.thread_ends()
            self.close_operators(stage.name, worker)
            if worker.leaves:
                self.staffing.removed(stage.name, worker)

    def serve(self, stage: StagePlan, worker: Worker, seen: int) -> None:
        self.threads.serve(
            worker,
            seen,
            partial(self._work_in, stage, worker),
            lambda run: self.staffing.apply_size(run, stage.name),
        )

    def _work_in(self, stage: StagePlan, worker: Worker, run: Run) -> None:
        try:
            loop = stage.kind.loop(run.stages[stage.name], worker)
            if "workers" in stage.tuned:
                self.staffing.work(loop, worker)
            else:
                for _ in loop:
                    pass
        except Cancelled:
            raise
        except BaseException as error:
            note(error, f"pipegraph: in stage {stage.name!r}")
            raise
        finally:
            worker.meter.began_ns = 0  # the run may have ended in the middle of an item
            loop = run = None  # type: ignore[assignment]  # the error's traceback holds this frame

    def _wait_for_other_stages(self, stage: str) -> bool:
        """Blocks until every other stage has a worker: in a small cluster, one stage's second actor could take the room
        that another's first needs. False if the start has failed."""

        def others() -> bool:
            return any(n for name, n in self._to_open.items() if name != stage)

        self.threads.wait_until(lambda: not others() or self.threads.closed or self._open_error is not None)
        return not others()

    def close_operators(self, stage: str, opened: Worker | Source) -> None:
        """Close a worker's operators, or a source, once each; errors become warnings at the end."""
        try:
            (opened.operator if isinstance(opened, Worker) else opened).close()
        except BaseException as error:
            self._close_errors.append(f"stage {stage!r}: close() raised {described(error)}")

    # -- closing -------------------------------------------------------------------------------

    def close(self, grace_s: float = GRACE_S) -> None:
        """End every thread. Idempotent; continues where an interrupted close stopped.

        Warns of workers that do not return within ``grace_s``. Called by the thread that is starting workers (in an
        operator's ``open``, say), it only notifies them: that thread closes what it has opened when it leaves.
        """
        with self.threads.lock:
            self.threads.closed = True
            run = self.run
            self.threads.changed()
        self.stopping.set()
        if run is not None:
            self._cancel(run)
        deadline = concurrency.monotonic() + grace_s
        owned = self._starting._is_owned  # type: ignore[attr-defined]  # as concurrency.Condition asks it
        # Both: each alone may be left over from a call that was interrupted.
        if self._starter is concurrency.current_thread() and owned():
            return
        try:
            if not self._starting.acquire(timeout=max(0.0, grace_s)):
                starter = self._starter
                warnings.warn(
                    f"the thread that starts the pipeline did not return within {grace_s:g} s; it closes what it has "
                    f"opened when it does; it stands at:\n{stack_of(starter)}",
                    StuckWorker,
                    stacklevel=3,
                )
                return
        finally:
            if owned():
                self._starting.release()  # the threads are closed: no start can begin
        with self._ending:
            self._end(grace_s, deadline)

    def _end(self, grace_s: float, deadline: float) -> None:
        warned = [
            f"stage {stage!r}: a worker did not return within {grace_s:g} s and was abandoned. Code that waits long "
            "can be ended with backend='process', or by the cancel() of your own source or operator. It stands at:\n"
            f"{stack_of(thread)}"
            for stage, thread in self.threads.join(deadline)
        ]
        if self.run is not None:
            self.run.end_inline()
        while self._opened:
            self.close_operators(*self._opened[-1])
            self._opened.pop()  # last: what was interrupted is closed by the next call
        while self._pools:
            next(iter(self._pools.values())).close()
            self._pools.pop(next(iter(self._pools)))
        self.workers, self.readers = {}, {}
        self.threads.run = None
        for message in warned:  # last: if warnings are errors, all else is done
            warnings.warn(message, StuckWorker, stacklevel=4)
        errors, self._close_errors = self._close_errors, []
        for message in errors:
            warnings.warn(message, PipegraphWarning, stacklevel=4)
