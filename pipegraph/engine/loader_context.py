"""The context that all runs of a loader share: plan, seed, rank, workers, counters and operators' contexts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from pipegraph import concurrency
from pipegraph.capabilities import Moves
from pipegraph.contracts import Context, Source
from pipegraph.engine.meter import Meter
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.engine.stage_worker import Worker
from pipegraph.engine.tracing import Tracer
from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.stopping import Stopping


class LoaderContext(ABC):
    """See the module docstring.

    Attributes:
        workers: by stage, the current workers.
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
        self.readers: dict[str, Source] = {}
        self.grown: dict[str, int] = {}
        self.capacities: dict[str, int] = {}
        self.counters: dict[str, dict[str, int]] = {}
        self._counting = concurrency.RLock()
        self._sharing = concurrency.RLock()
        self._shared: dict[tuple[str, str], Any] = {}
        # The trainer's own accelerator, asked in its thread: those of stages have none of their own.
        self._device = None
        if any(stage.memory == "delivered" for stage in plan.running):
            from pipegraph.device.present import current_device

            self._device = current_device()

    @abstractmethod
    def make_operator(self, stage: StagePlan, index: int) -> Any:
        """The operator of one worker: a copy, or a proxy for one in another process."""

    @abstractmethod
    def open_operator(self, stage: str, worker: Worker) -> None:
        """Open a worker's operator, in its own thread."""

    @abstractmethod
    def close_operators(self, stage: str, opened: Worker | Source) -> None:
        """Close a worker's operators, or a source, once each; errors become warnings at the end."""

    @abstractmethod
    def serve(self, stage: StagePlan, worker: Worker, seen: int) -> None:
        """Work in every run after number ``seen``, until this is closed or the worker is to leave."""

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

        def share(name: str, make: Callable[[], Any]) -> Any:
            with self._sharing:
                if (stage, name) not in self._shared:
                    self._shared[stage, name] = make()
                return self._shared[stage, name]

        readers = [self.plan.stages[name].operator for name, _, _ in self.plan.consumers(stage)]
        movers = [each.can(Moves) for each in readers]
        read = not all(each is not None and each.fetches for each in movers)
        place = stage, self.seed, self.rank, self.world_size, worker
        memory = self.plan.stages[stage].memory
        pinned_for = [each.pinned_for() for each in movers if each is not None]
        device = next((found for found in pinned_for if found is not None), self._device)
        return Context(*place, self.stopping, count, share, read, memory, self.memory_limit, device)
