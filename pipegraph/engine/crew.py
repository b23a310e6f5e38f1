"""The crew of a loader: its workers' threads, which work in one run at a time.

Behaviour contract (what differs from this is a bug):

* A ``Crew`` owns the threads of a loader's workers. They start with the first run and live until ``close``; each worker
  opens its own copy of its operator once, in its own thread. Tuned stages gain and lose workers while passes run: a
  worker leaves between two units of work, when all that it took has been sent, so that order, bytes and cursors never
  depend on it.
* A ``Run`` is the wiring for consecutive epochs: fresh channels, account and stages. A pass that
  follows the one before continues the run; any other (after a ``break``, ``set_epoch`` or
  ``load_state_dict``) cancels it, waits until every worker has left it, and starts another.
* A failure that belongs to no item goes to ``Run.fail``: the first error is kept, everything is
  cancelled, and the consumer raises it.
* When every thread of a run waits (``activity``), the thread that noticed enlarges the smallest full
  queue that a fan-in reads (Parks, "Bounded Scheduling of Process Networks", 1995), or ends the run with the reason. It
  never hangs.
* ``close`` may be called from any thread at any moment. It cancels, wakes, and joins for ``GRACE_S``; a worker that
  has not returned by then is named with its stack in a ``StuckWorker`` warning and abandoned (its thread is a daemon).

Invariants, all under ``threads.lock``: once that is ``closed`` no run is published, so the thread that sets it cancels
the last one; every worker with a ``run`` is counted by the run's ``activity``, and only ready ones have one; and no two
workers of a stage have the same index. What calls operators is done outside the lock. ``_turn`` is held by the thread
that starts workers or a run, or ends all: nothing is closed under it, it finds that the threads are closed, and leaves.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from functools import partial
from time import perf_counter_ns

from pipegraph import concurrency
from pipegraph.contracts import history_of
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.loader_context import LoaderContext, WorkerTime
from pipegraph.engine.meter import Meter
from pipegraph.engine.run import Run
from pipegraph.engine.stage.restore import Resume
from pipegraph.engine.stage_worker import Worker
from pipegraph.engine.threads import Threads, stack_of
from pipegraph.engine.worker_thread import live
from pipegraph.errors import Naming, PipegraphWarning, StuckWorker
from pipegraph.planning.plan import Plan, StagePlan

GRACE_S = 5.0
"""Seconds that ``close`` waits for user code to return, and that a new pass waits before it logs for whom."""

log = logging.getLogger("pipegraph")


class Crew(LoaderContext):
    """See the module docstring. The consumer's thread starts and ends runs; any thread may resize and ``close``."""

    def __init__(self, plan: Plan, memory_limit: int, seed: int, rank: int, world_size: int) -> None:
        super().__init__(plan, memory_limit, seed, rank, world_size)
        self.threads = Threads(plan.graph_name)
        self.run: Run | None = None
        self.half_started = False  # while workers start, and if that has failed or was interrupted
        self._tuned = {stage.name: stage for stage in plan.running if stage.tuned}
        # An RLock's ``__exit__`` is C: no interrupt can skip its release.
        self._turn = concurrency.RLock()
        self._starter: concurrency.Thread | None = None  # the thread that holds it to start a run
        self._error: BaseException | None = None  # of the start, or of what no worker recovers from
        self._refused: dict[str, BaseException] = {}
        self.local = concurrency.local()  # the worker of each thread

    # -- runs ----------------------------------------------------------------------------------

    def start_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        """Cancel the current run, if any, and start one at ``epoch``.

        Raises:
            Cancelled: this was closed.
            Exception: an operator's ``open`` raised it; a note names the stage.
        """
        self.end_run()
        with self._turn:
            self._starter = concurrency.current_thread()
            try:
                if self.threads.closed:
                    raise Cancelled
                if not self.workers:
                    self.half_started = True
                    self._start_workers()
                    self.half_started = False
                return self._start_run(epoch, horizon, resume)
            finally:
                self._starter = None

    def _start_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        for stage in self.plan.running:  # no worker is inside a run now
            operators = [worker.operator for worker in self.workers[stage.name] if worker.ready]
            for operator in operators:
                operator.uncancel()
            if stage.source is not None:
                for source in (*operators, *filter(None, [self.readers.get(stage.name)])):
                    with Naming(stage.name, "begin_run", ", in its begin_run"):
                        source.begin_run(epoch, history_of(resume.history, stage.name))
        run = Run(self, epoch, horizon, resume)
        run.activity.attach()  # the consumer
        for stage in self.plan.running:
            if stage.backend.in_consumer:
                run.pumps(stage, self.workers[stage.name][0])
        with self.threads.lock:
            if self.threads.closed:
                raise Cancelled
            if self._error is not None:  # a worker failed after the start
                raise self._error
            for name, stage in self._tuned.items():
                self.apply_size(run, name)
                if "workers" in stage.tuned:  # not an inline one's: another stage's worker may be its driver
                    for channel in run.stages[name].inboxes:
                        channel.leaving = self._leaving
            ready = [worker for worker in self._all_workers() if worker.ready and worker.thread]
            run.activity.attach(len(ready))
            self.run = run  # first: an interrupt from here on is followed by ``end_run``
            for worker in ready:
                worker.run = run
            self.threads.changed()
        return run

    def end_run(self) -> None:
        """Cancel the current run and wait until every worker has left it; logs which have not after ``GRACE_S``."""
        run = self.run
        if run is None:
            return
        self._cancel(run)
        threads = self.threads
        with threads.lock:
            threads.changed()  # a start that was interrupted may not have come to it

        def left() -> bool:
            return threads.closed or not any(worker.run for worker in self._all_workers())

        if not threads.wait_until(left, GRACE_S):
            with threads.lock:
                stuck = [
                    (name, each.thread)
                    for name, workers in self.workers.items()
                    for each in workers
                    if each.run
                ]
            for name, thread in stuck:
                log.warning(
                    "stage %r: a new pass waits for its worker, which is still in the one before; it stands at:\n%s",
                    *(name, stack_of(thread)),
                )
            threads.wait_until(left)
        with threads.lock:
            if threads.closed:
                return
            self.run = None
        run.end_inline()

    def _cancel(self, run: Run) -> None:
        run.cancel()
        for worker in self._all_workers():
            if worker.ready:
                worker.operator.cancel()

    def fail(self, error: BaseException) -> None:
        """End the current run with this error, and every later one, or the start. Called by any thread."""
        with self.threads.lock:
            self._error = error if self._error is None else self._error
            self.threads.changed()
            run = self.run
        if run is not None:
            run.fail(error)
            self._cancel(run)

    def _all_workers(self) -> list[Worker]:
        return [worker for workers in self.workers.values() for worker in workers]

    # -- workers -------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        workers = {
            name: [
                Worker(index, operator, Meter(name, self.tracer)) for index, operator in enumerate(operators)
            ]
            for name, operators in self.make_operators().items()
        }
        first: list[tuple[StagePlan, Worker]] = []
        late: list[tuple[StagePlan, Worker]] = []
        for stage in self.plan.running:
            for worker in workers[stage.name]:
                worker.late = stage.backend.joins_late and worker.index > 0
                if stage.backend.in_consumer:
                    self.open_operator(stage, worker)
                    worker.ready = True
                else:
                    (late if worker.late else first).append((stage, worker))
        # One assignment each: other threads may read them at any time.
        self.meters = {name: [worker.meter for worker in each] for name, each in workers.items()}
        self._times = {
            name: WorkerTime(stage.workers, perf_counter_ns()) for name, stage in self._tuned.items()
        }
        self.workers = workers
        self._launch(first)
        threads = self.threads
        threads.wait_until(
            lambda: threads.closed or self._error is not None or all(worker.ready for _, worker in first)
        )
        if self._error is not None:
            raise self._error
        # A source whose `open` was cut short must not repeat its work in a run, where nothing would end it.
        if threads.closed:
            raise Cancelled
        # In a small cluster, one stage's second actor could take the room that another's first needs.
        self._launch(late)

    def _launch(self, coming: list[tuple[StagePlan, Worker]]) -> None:
        def failed(index: int, error: BaseException) -> None:
            self.lost(*coming[index], error)
            self.remove(*coming[index])

        if coming:
            lives = [
                (stage.name, worker.index, partial(live, self, stage, worker)) for stage, worker in coming
            ]
            self.threads.start(lives, failed)

    def lost(self, stage: StagePlan, worker: Worker, error: BaseException) -> None:
        """A worker could not join: a stage that is tuned goes on without it."""
        if worker.late and "workers" in stage.tuned:
            with self.threads.lock:
                self._refused[stage.name] = error
        else:
            self.fail(error)

    def remove(self, stage: StagePlan, worker: Worker) -> None:
        """The worker is gone; under the lock."""
        if not self.threads.closed:  # else the others look at it while they end
            self.workers[stage.name] = [each for each in self.workers[stage.name] if each is not worker]
        self.threads.changed()

    # -- sizes ---------------------------------------------------------------------------------

    def resize(self, stage: str, workers: int) -> None:
        """Set the number of workers of a tuned stage, at least one. Returns before they have joined or left."""
        with self.threads.lock:
            if self.threads.closed or not self.workers:
                return
            here = self.workers[stage]
            staying = sorted((each for each in here if not each.leaves), key=lambda each: each.index)
            for worker in staying[max(1, workers) :]:
                worker.leaves = True
            taken = {worker.index for worker in here}
            free = itertools.islice(
                (n for n in itertools.count() if n not in taken), max(0, workers - len(staying))
            )
            coming = [Worker(index, None, self._meter(stage, index), late=True) for index in free]
            self.workers[stage] = [*here, *coming]
            self.threads.changed()
            run = self.run
        if run is not None and workers < len(staying):
            for channel in run.stages[stage].inboxes:
                channel.nudge_all()
        self._launch([(self._tuned[stage], worker) for worker in coming])

    def set_capacity(self, stage: str, capacity: int) -> None:
        """Set the capacity of a tuned stage's queues, at least one bundle of rows."""
        with self.threads.lock:
            self.capacities[stage] = max(capacity, self._tuned[stage].bundle_rows)
            if self.run is not None and self.workers:
                self.apply_size(self.run, stage)

    def count(self, stage: str) -> int:
        """How many workers there are, including those that are opening or about to leave."""
        with self.threads.lock:
            return len(self.workers.get(stage, ()))

    def settled(self) -> bool:
        """Whether no worker is joining or leaving."""
        with self.threads.lock:
            tuned = [worker for name in self._tuned for worker in self.workers.get(name, ())]
            return all(worker.ready and not worker.leaves for worker in tuned)

    def refused(self) -> dict[str, BaseException]:
        """By stage, the error with which a worker failed to start; each is returned once."""
        with self.threads.lock:
            found, self._refused = self._refused, {}
        return found

    def apply_size(self, run: Run, stage: str) -> None:
        """Apply the current number of workers and capacity to a stage of a run; under the lock."""
        if stage in self._tuned:
            workers = sum(worker.ready for worker in self.workers.get(stage, ()))
            self._times[stage].change(workers)
            run.stages[stage].staff(max(1, workers), self.capacity(stage))

    def _leaving(self) -> bool:
        """Whether the worker of the calling thread is to leave."""
        worker = getattr(self.local, "worker", None)
        return worker is not None and worker.leaves

    def _meter(self, stage: str, index: int) -> Meter:
        """The meter for this index; it outlives the worker, so that no counts are lost."""
        meters = self.meters[stage]
        if index == len(meters):
            self.meters[stage] = [*meters, Meter(stage, self.tracer)]
        return self.meters[stage][index]

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
        owned = self._turn._is_owned  # type: ignore[attr-defined]  # as concurrency.Condition asks it
        # Both: each alone may be left over from a call that was interrupted.
        if self._starter is concurrency.current_thread() and owned():
            return
        try:
            if not self._turn.acquire(timeout=max(0.0, grace_s)):
                starter = self._starter
                if starter is not None:
                    warnings.warn(
                        f"the thread that starts the pipeline did not return within {grace_s:g} s; it closes what it "
                        f"has opened when it does; it stands at:\n{stack_of(starter)}",
                        StuckWorker,
                        stacklevel=3,
                    )
                    return
                self._turn.acquire()  # another thread closes
            self._end(grace_s, deadline)
        finally:
            if owned():
                self._turn.release()

    def _end(self, grace_s: float, deadline: float) -> None:
        warned = [
            f"stage {stage!r}: a worker did not return within {grace_s:g} s and was abandoned. Code that waits long "
            "can be ended with backend='process', or by the cancel() of your own source or operator. It stands at:\n"
            f"{stack_of(thread)}"
            for stage, thread in self.threads.join(deadline)
        ]
        if self.run is not None:
            self.run.end_inline()
        errors = self.close_operators()
        self.workers, self.readers = {}, {}
        self.run = None
        for message in warned:  # last: if warnings are errors, all else is done
            warnings.warn(message, StuckWorker, stacklevel=4)
        for message in errors:
            warnings.warn(message, PipegraphWarning, stacklevel=4)
