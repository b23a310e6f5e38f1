"""Who works in each stage, where that may change while a pass runs.

A worker joins from a thread of its own, once its operator is open, and leaves between two units of work: what it took
has been sent then, so that order, bytes and cursors never depend on it. It is counted from the moment at which its
thread is asked for until its operator is closed: a budget of workers holds at every moment.

Invariant, under the runtime's lock: a worker is in ``_joining`` or among the runtime's workers, never in both; its
index is taken by no other. One that joins a run is counted in by ``activity`` and is ``inside`` before it works.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

from pipegraph.contracts import Source, history_of
from pipegraph.engine.activity import Cancelled, Leaving
from pipegraph.engine.loader_context import LoaderContext
from pipegraph.engine.meter import Meter
from pipegraph.engine.run import Run
from pipegraph.engine.stage.expand_loop import Loop
from pipegraph.engine.stage_worker import Worker
from pipegraph.engine.worker_threads import WorkerThreads
from pipegraph.global_generators import enter_worker
from pipegraph.planning.plan import StagePlan


@dataclass
class Present:
    """How many workers take part in a stage, and how long all of them together have."""

    workers: int
    since_ns: int
    total_ns: int = 0

    def until(self, now_ns: int) -> int:
        """Nanoseconds of all workers until now."""
        return self.total_ns + self.workers * (now_ns - self.since_ns)

    def change(self, workers: int) -> None:
        """So many from now on."""
        now = perf_counter_ns()
        self.total_ns, self.since_ns, self.workers = self.until(now), now, workers


class Staffing:
    """See the module docstring. Thread-safe."""

    def __init__(self, loader: LoaderContext, threads: WorkerThreads) -> None:
        self._loader = loader
        self._threads = threads
        self._tuned = {stage.name: stage for stage in loader.plan.running if stage.tuned}
        self._joining: dict[str, list[Worker]] = {name: [] for name in self._tuned}
        self._present: dict[str, Present] = {}
        self._refused: dict[str, BaseException] = {}
        self._here = threading.local()  # which worker works in a thread
        self._opening = threading.Lock()  # held while a worker opens: a close waits for one at most
        self._sizing = (
            threading.Lock()
        )  # held while a stage gets its size: the last one that it gets is the newest

    # -- facts ---------------------------------------------------------------------------------

    def capacity(self, stage: str) -> int:
        """What a stage's queues may hold, as planned or chosen since."""
        return self._loader.capacities.get(stage, self._loader.plan.stages[stage].capacity)

    def workers(self, stage: str) -> int:
        """How many take part now."""
        present = self._present.get(stage)
        return self._loader.planned(stage).workers if present is None else present.workers

    def count(self, stage: str) -> int:
        """How many there are, those included that are opening and those that have not left yet."""
        with self._threads.lock:
            return len(self._loader.workers.get(stage, ())) + len(self._joining[stage])

    def settled(self) -> bool:
        """Whether nobody is joining or leaving."""
        with self._threads.lock:
            return not any(self._joining.values()) and not any(
                worker.leaves for name in self._tuned for worker in self._loader.workers.get(name, ())
            )

    def worked_ns(self, stage: str, now_ns: int) -> int:
        """How long its workers have been there, all together; what it grows by is worker-time."""
        present = self._present.get(stage)
        return self._loader.planned(stage).workers * now_ns if present is None else present.until(now_ns)

    def refused(self) -> dict[str, BaseException]:
        """Per stage the error with which a worker could not be started, each reported once."""
        with self._threads.lock:
            found, self._refused = self._refused, {}
        return found

    # -- changes -------------------------------------------------------------------------------

    def resize(self, stage: str, workers: int) -> None:
        """Let a tuned stage have so many workers, at least one. Returns at once; they come and go by themselves."""
        loader, threads = self._loader, self._threads
        coming: dict[threading.Thread, Worker] = {}
        with threads.lock:
            if threads.closed or not loader.workers:
                return
            here, joining = loader.workers[stage], self._joining[stage]
            staying = [worker for worker in (*here, *joining) if not worker.leaves]
            for worker in sorted(staying, key=lambda each: each.index)[max(1, workers) :]:
                worker.leaves = True
            taken = {worker.index for worker in (*here, *joining)}
            for _ in range(workers - len(staying)):
                index = next(number for number in range(len(taken) + 1) if number not in taken)
                taken.add(index)
                worker = Worker(index, None, self._meter(stage, index))
                joining.append(worker)
                life = partial(self._join, self._tuned[stage], worker)
                coming[threads.make(stage, index, life)] = worker
            threads.condition.notify_all()
            run = threads.run
        if run is not None and workers < len(staying):
            for channel in run.stages[stage].inboxes:
                channel.nudge_all()
        if coming:

            def failed(thread: threading.Thread, error: BaseException) -> None:
                self._refused[stage] = error
                self._joining[stage].remove(coming[thread])

            threads.launch(list(coming), failed)

    def set_capacity(self, stage: str, capacity: int) -> None:
        """Let a tuned stage's queues hold so many items, at least one bundle of rows."""
        loader, threads = self._loader, self._threads
        with threads.lock:
            loader.capacities[stage] = max(capacity, self._tuned[stage].bundle_rows)
            run = threads.run
        if run is not None:
            self.apply_size(run, stage)

    # -- for the runtime -----------------------------------------------------------------------

    def begin(self) -> None:
        """The first workers are about to start."""
        now = perf_counter_ns()
        self._present = {name: Present(stage.workers, now) for name, stage in self._tuned.items()}

    def enter(self, run: Run) -> None:
        """A run is about to be published; the runtime's lock is held, and nobody works in the run yet."""
        for name, stage in self._tuned.items():
            run.stages[name].staff(self._taking_part(name), self._loader.capacity(name))
            if (
                "workers" in stage.tuned
            ):  # not an inline one's, where the worker of another stage may be its driver
                for channel in run.stages[name].inboxes:
                    channel.leaving = self._leaving

    def apply_size(self, run: Run, stage: str) -> None:
        """Give a stage of a run its size."""
        loader, threads = self._loader, self._threads
        with self._sizing:
            with threads.lock:
                workers, capacity = self._taking_part(stage), loader.capacity(stage)
                self._present[stage].change(workers)
            run.stages[stage].staff(max(1, workers), capacity)

    def work(self, loop: Loop, worker: Worker) -> None:
        """Run a loop until its worker is to leave."""
        self._here.worker = worker
        with suppress(Leaving):
            for halfway in loop:
                if worker.leaves and not halfway:
                    return

    def _leaving(self) -> bool:
        """Whether the worker whose thread this is leaves."""
        worker = getattr(self._here, "worker", None)
        return worker is not None and worker.leaves

    def gone(self, stage: str, worker: Worker) -> None:
        """A worker has left and closed its operator."""
        loader, threads = self._loader, self._threads
        with threads.lock:
            if not threads.closed:
                loader.workers[stage] = [each for each in loader.workers[stage] if each is not worker]
            threads.condition.notify_all()

    # -- joining -------------------------------------------------------------------------------

    def _taking_part(self, stage: str) -> int:
        return sum(worker.opened for worker in self._loader.workers[stage])

    def _meter(self, stage: str, index: int) -> Meter:
        """The meter of this index: what a worker counts is kept when it leaves."""
        meters = self._loader.meters[stage]
        if index < len(meters):
            return meters[index]
        meter = Meter(stage, self._loader.tracer)
        self._loader.meters[stage] = [*meters, meter]
        return meter

    def _join(self, stage: StagePlan, worker: Worker) -> None:
        """The life of a worker that comes later."""
        loader, threads, name = self._loader, self._threads, stage.name
        worker.meter.thread_begins()
        enter_worker(loader.seed, name)
        try:
            with self._opening:
                if threads.closed or worker.leaves:
                    raise Cancelled
                worker.operator = loader.make_operator(stage, worker.index)
                loader.open_operator(name, worker)
        except BaseException as error:
            worker.meter.thread_ends()
            with threads.lock:
                if not isinstance(error, Cancelled):
                    self._refused[name] = error
                self._joining[name].remove(worker)
                threads.condition.notify_all()
            return
        try:
            found = self._admitted(stage, worker)
            if found is not None:
                run, seen = found
                self.apply_size(run, name)
                del run, found
                loader.serve(stage, worker, seen)
        except BaseException as error:  # what a source does as a run begins
            with threads.lock:
                self._refused[name] = error
        finally:
            worker.meter.thread_ends()
            loader.close_operators(name, worker)
            with threads.lock, suppress(ValueError):
                self._joining[name].remove(worker)
            self.gone(name, worker)

    def _admitted(self, stage: StagePlan, worker: Worker) -> tuple[Run, int] | None:
        """The run that an opened worker has joined, and the number of the one before; None if it is wanted no more."""
        loader, threads, name = self._loader, self._threads, stage.name
        while True:
            with threads.lock:
                while not (threads.closed or worker.leaves) and (threads.run is None or threads.run.over):
                    threads.condition.wait()
                if threads.closed or worker.leaves:
                    return None
                run = threads.run
                assert run is not None
            if isinstance(stage.operator, Source):
                worker.operator.begin_run(run.first_epoch, history_of(run.history, name))
            with threads.lock:
                if threads.run is not run or run.over or threads.closed or worker.leaves:
                    continue
                self._joining[name].remove(worker)
                loader.workers[name] = [*loader.workers[name], worker]
                return run, threads.enter()
