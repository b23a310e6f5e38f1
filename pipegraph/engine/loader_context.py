"""What all runs of a loader share: plan, seed, rank, counters, workers, and their operators, with the hosts of those in
other processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency
from pipegraph.backends import BACKENDS, StageBackend
from pipegraph.contracts import Context, Source
from pipegraph.engine.meter import Meter
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage_worker import Worker
from pipegraph.engine.tracing import Tracer
from pipegraph.errors import Naming, described
from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.stopping import Stopping

if TYPE_CHECKING:
    from pipegraph.engine.remote.pool import Pool


@dataclass(eq=False, repr=False)
class WorkerTime:
    """The number of a stage's workers that take part, and their total time in it."""

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


class LoaderContext:
    """See the module docstring. An operator is opened and closed by its worker's thread; those of inline stages and the
    readers of sources by the one that starts the loader.

    Attributes:
        workers: by stage, from the request for their thread until their operator is closed.
        meters: by stage, those of all its workers so far; kept after ``close``.
        readers: by random-access source, the copy that gives its positions.
        grown: by stage, the capacity of queues that had to grow.
        capacities: by stage, the capacity of queues that was set while the loader runs.
        counters: by stage, the counters of its operators.
    """

    def __init__(self, plan: Plan, memory_limit: int, seed: int, rank: int, world_size: int) -> None:
        self.plan = plan
        self.memory_limit = memory_limit
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.stopping = Stopping()
        self.ledger = Ledger()
        self.tracer = Tracer()
        self.workers: dict[str, list[Worker]] = {}
        self.meters: dict[str, list[Meter]] = {}
        self._times: dict[str, WorkerTime] = {}  # of tuned stages
        self.readers: dict[str, Source] = {}
        self.grown: dict[str, int] = {}
        self.capacities: dict[str, int] = {}
        self.counters: dict[str, dict[str, int]] = {}
        self._pools: dict[StageBackend, Pool[Any]] = {}
        self._opened: list[tuple[str, object]] = []  # not by workers' threads
        self._close_errors: list[str] = []
        self._counting = concurrency.RLock()
        self._sharing = concurrency.RLock()
        self._shared: dict[tuple[str, str], object] = {}
        # The trainer's own accelerator, asked in its thread: those of stages have none of their own.
        self._device = None
        if any(stage.memory == "delivered" for stage in plan.running):
            from pipegraph.device.backend import current_device

            self._device = current_device()

    # -- workers -------------------------------------------------------------------------------

    def taking_part(self, stage: str) -> int:
        """How many workers of a stage take part now."""
        return self._times[stage].workers if stage in self._times else self.plan.stages[stage].workers

    def worked_ns(self, stage: str, now_ns: int) -> int:
        """A counter of worker-nanoseconds; only its growth has a meaning."""
        return self._times[stage].until(now_ns) if stage in self._times else self.taking_part(stage) * now_ns

    # -- queues --------------------------------------------------------------------------------

    def capacity(self, stage: str) -> int:
        """Capacity of a stage's queues: planned or set since, and grown by Parks' rule."""
        chosen = self.capacities.get(stage, self.plan.stages[stage].capacity)
        return max(chosen, self.grown.get(stage, 0))

    def note_growth(self, stage: str, capacity: int) -> None:
        """Parks' rule enlarged a queue: later runs start with it."""
        self.grown[stage] = max(capacity, self.grown.get(stage, 0))

    def context(self, stage: str, worker: int) -> Context:
        """The context with which a worker opens its operator."""
        counters = self.counters.setdefault(stage, {})

        def count(name: str, n: int) -> None:
            with self._counting:
                counters[name] = counters.get(name, 0) + n

        def share(name: str, make: Callable[[], object]) -> object:
            with self._sharing:
                if (stage, name) not in self._shared:
                    self._shared[stage, name] = make()
                return self._shared[stage, name]

        readers = [self.plan.stages[name].traits for name, _, _ in self.plan.consumers(stage)]
        read = not all(each.moves == "slices" for each in readers)
        place = stage, self.seed, self.rank, self.world_size, worker
        memory = self.plan.stages[stage].memory
        pinned_for = (each.pinned_for() for each in readers)
        device = next((found for found in pinned_for if found is not None), self._device)
        return Context(*place, self.stopping, count, share, read, memory, self.memory_limit, device)

    # -- operators -----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End the current run with this error, and every later one, or the start. Called by any thread."""
        raise NotImplementedError

    def make_operators(self) -> dict[str, list[object]]:
        """Those of the first workers of each stage; opens the sources' readers."""
        plan, readers = self.plan, self.readers
        for backend in BACKENDS.values():
            if backend.pool and any(stage.backend == backend for stage in plan.running):
                self._pools[backend] = backend.load_pool()(plan, self.fail)
        made = {
            stage.name: [self.make_operator(stage, index) for index in range(stage.workers)]
            for stage in plan.running
        }
        for stage in plan.running:
            if stage.source is not None and stage.source.random_access:
                readers[stage.name] = copy.copy(stage.source)
        if any(stage.caches for stage in plan.running):
            from pipegraph.engine.stage.cache_wiring import wire_cache

            wire_cache(plan, made, readers)
        for name, reader in readers.items():
            with Naming(name, "open", ": the source could not be opened"):
                reader.open(self.context(name, 0))
            self._opened.append((name, reader))
        return made

    def make_operator(self, stage: StagePlan, index: int) -> Any:
        """The operator of one worker: a copy, or a proxy for one in another process."""
        if not stage.remote:
            return copy.copy(stage.operator)
        return self._pools[stage.backend].operator(stage, self.context(stage.name, index))

    def open_operator(self, stage: StagePlan, worker: Worker) -> None:
        """Open a worker's operator."""
        name = stage.name
        with Naming(name, "open", f": worker {worker.index} could not be started"):
            worker.operator.open(self.context(name, worker.index))
        if stage.backend.in_consumer:
            self._opened.append((name, worker.operator))

    def close_operator(self, stage: str, operator: Any) -> None:
        """Close a worker's operator or a reader; an error becomes a warning at the end."""
        try:
            operator.close()
        except BaseException as error:
            self._close_errors.append(f"stage {stage!r}: close() raised {described(error)}")

    def close_operators(self) -> list[str]:
        """Close what no worker's thread does; returns what went wrong in all closes."""
        while self._opened:
            self.close_operator(*self._opened[-1])
            self._opened.pop()  # last: what was interrupted is closed by the next call
        while self._pools:
            next(iter(self._pools.values())).close()
            self._pools.pop(next(iter(self._pools)))
        errors, self._close_errors = self._close_errors, []
        return errors
