"""The context that all runs of a loader share: plan, seed, rank, workers, counters and operators' contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from pipegraph import concurrency
from pipegraph.contracts import Context, Source
from pipegraph.engine.meter import Meter
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage_worker import Worker
from pipegraph.engine.tracing import Tracer
from pipegraph.planning.plan import Plan
from pipegraph.stopping import Stopping


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
    """See the module docstring.

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
