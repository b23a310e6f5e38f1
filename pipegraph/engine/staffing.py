"""Adds workers to stages and removes them while a pass runs.

A worker joins from a thread of its own, once its operator is open. It leaves between two units of work, when all that
it took has been sent, so that order, bytes and cursors never depend on it. It counts from the request for its thread
until its operator is closed, so that a budget of workers holds at every moment.

Invariants, under the runtime's lock: a worker is in ``_joining`` or among the runtime's workers, never in both, and no
two have the same index. A worker that joins a run is counted by ``activity`` and is ``inside`` before it works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

from pipegraph import concurrency
from pipegraph.contracts import history_of
from pipegraph.engine.activity import Cancelled, Leaving
from pipegraph.engine.loader_context import LoaderContext
from pipegraph.engine.meter import Meter
from pipegraph.engine.run import Run
from pipegraph.engine.stage_worker import Worker
from pipegraph.engine.worker_threads import WorkerThreads
from pipegraph.global_generators import enter_worker
from pipegraph.planning.plan import StagePlan


@dataclass(eq=False, repr=False)
class WorkerTime:
    """Counts the workers of one stage, and their total time in it."""

    workers: int
    since_ns: int
    total_ns: int = 0

    def until(self, now_ns: int) -> int:
        """Worker-nanoseconds until now."""
        return self.total_ns + self.workers * (now_ns - self.since_ns)

    def change(self, workers: int) -> None:
        """Set the number of workers."""
        now = perf_counter_ns()
        self.total_ns, self.since_ns, self.workers = self.until(now), now, workers


class Staffing:
    """Staffs the tuned stages; see the module docstring. Thread-safe."""

    def __init__(self, loader: LoaderContext, threads: WorkerThreads) -> None:
        self._loader = loader
        self._threads = threads
        self._tuned = {stage.name: stage for stage in loader.plan.running if stage.tuned}
        self._joining: dict[str, list[Worker]] = {name: [] for name in self._tuned}
        self._worker_time: dict[str, WorkerTime] = {}
        self._refused: dict[str, BaseException] = {}
        self._local = concurrency.local()  # the worker of each thread
        self._opening = concurrency.Lock()  # held while a worker opens: a close waits for one at most
        self._sizing = concurrency.Lock()  # held while a size is applied, so that the newest is the last

    # -- inspection ----------------------------------------------------------------------------

    def workers(self, stage: str) -> int:
        """How many workers take part now."""
        time = self._worker_time.get(stage)
        return self._loader.plan.stages[stage].workers if time is None else time.workers

    def count(self, stage: str) -> int:
        """How many workers there are, including those that are opening or about to leave."""
        with self._threads.lock:
            return len(self._loader.workers.get(stage, ())) + len(self._joining[stage])

    def settled(self) -> bool:
        """Whether no worker is joining or leaving."""
        with self._threads.lock:
            return not any(self._joining.values()) and not any(
                worker.leaves for name in self._tuned for worker in self._loader.workers.get(name, ())
            )

    def worked_ns(self, stage: str, now_ns: int) -> int:
        """A counter of worker-nanoseconds; only its growth has a meaning."""
        time = self._worker_time.get(stage)
        return self._loader.plan.stages[stage].workers * now_ns if time is None else time.until(now_ns)

    def refused(self) -> dict[str, BaseException]:
        """By stage, the error with which a worker failed to start; each is returned once."""
        with self._threads.lock:
            found, self._refused = self._refused, {}
        return found

    # -- changes -------------------------------------------------------------------------------

    def resize(self, stage: str, workers: int) -> None:
        """Set the number of workers of a tuned stage, at least one. Returns before they have joined or left."""
        loader, threads = self._loader, self._threads
        coming: dict[concurrency.Thread, Worker] = {}
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
            threads.changed()
            run = threads.run
        if run is not None and workers < len(staying):
            for channel in run.stages[stage].inboxes:
                channel.nudge_all()
        if coming:

            def failed(thread: concurrency.Thread, error: BaseException) -> None:
                self._refused[stage] = error
                self._joining[stage].remove(coming[thread])

            threads.launch(list(coming), failed)

    def set_capacity(self, stage: str, capacity: int) -> None:
        """Set the capacity of a tuned stage's queues, at least one bundle of rows."""
        loader, threads = self._loader, self._threads
        with threads.lock:
            loader.capacities[stage] = max(capacity, self._tuned[stage].bundle_rows)
            run = threads.run
        if run is not None:
            self.apply_size(run, stage)

    # -- for the runtime -----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to count, as the first workers are about to start."""
        now = perf_counter_ns()
        self._worker_time = {name: WorkerTime(stage.workers, now) for name, stage in self._tuned.items()}

    def enter(self, run: Run) -> None:
        """A run is about to be published; the runtime's lock is held, and no worker is in the run yet."""
        for name, stage in self._tuned.items():
            run.stages[name].staff(self._opened_workers(name), self._loader.capacity(name))
            if (
                "workers" in stage.tuned
            ):  # not an inline one's, where the worker of another stage may be its driver
                for channel in run.stages[name].inboxes:
                    channel.leaving = self._leaving

    def apply_size(self, run: Run, stage: str) -> None:
        """Apply the current number of workers and capacity to a stage of a run."""
        loader, threads = self._loader, self._threads
        with self._sizing:
            with threads.lock:
                if not loader.workers:  # closed since
                    return
                workers, capacity = self._opened_workers(stage), loader.capacity(stage)
                self._worker_time[stage].change(workers)
            run.stages[stage].staff(max(1, workers), capacity)

    def work(self, loop: Iterator[Any], worker: Worker) -> None:
        """Run a loop until its end, or until its worker is to leave."""
        self._local.worker = worker
        with suppress(Leaving):
            for halfway in loop:
                if worker.leaves and not halfway:
                    return

    def _leaving(self) -> bool:
        """Whether the worker of the calling thread is to leave."""
        worker = getattr(self._local, "worker", None)
        return worker is not None and worker.leaves

    def removed(self, stage: str, worker: Worker) -> None:
        """Remove a worker that has left and closed its operator."""
        loader, threads = self._loader, self._threads
        with threads.lock:
            if not threads.closed:
                loader.workers[stage] = [each for each in loader.workers[stage] if each is not worker]
            threads.changed()

    # -- joining -------------------------------------------------------------------------------

    def _opened_workers(self, stage: str) -> int:
        return sum(worker.opened for worker in self._loader.workers[stage])

    def _meter(self, stage: str, index: int) -> Meter:
        """The meter for this index; it outlives the worker, so that no counts are lost."""
        meters = self._loader.meters[stage]
        if index < len(meters):
            return meters[index]
        meter = Meter(stage, self._loader.tracer)
        self._loader.meters[stage] = [*meters, meter]
        return meter

    def _join(self, stage: StagePlan, worker: Worker) -> None:
        """Body of the thread of a worker that joins later."""
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
                threads.changed()
            return
        try:
            found = self._enter_run(stage, worker)
            if found is not None:
                run, seen = found
                self.apply_size(run, name)
                del run, found
                loader.serve(stage, worker, seen)
        except BaseException as error:  # from a source's ``begin_run``
            with threads.lock:
                self._refused[name] = error
        finally:
            worker.meter.thread_ends()
            loader.close_operators(name, worker)
            with threads.lock, suppress(ValueError):
                self._joining[name].remove(worker)
            self.removed(name, worker)

    def _enter_run(self, stage: StagePlan, worker: Worker) -> tuple[Run, int] | None:
        """The run that an opened worker joined, and the number of the run before; None if not needed any more."""
        loader, threads, name = self._loader, self._threads, stage.name
        while True:
            threads.wait_until(
                lambda: threads.closed or worker.leaves or not (threads.run is None or threads.run.over)
            )
            with threads.lock:
                if threads.closed or worker.leaves:
                    return None
                run = threads.run
                if run is None:
                    continue
            if stage.source is not None:
                worker.operator.begin_run(run.first_epoch, history_of(run.history, name))
            with threads.lock:
                if threads.run is not run or run.over or threads.closed or worker.leaves:
                    continue
                self._joining[name].remove(worker)
                loader.workers[name] = [*loader.workers[name], worker]
                return run, threads.enter()
