"""Contexts for the operators of one loader, their counters, and the objects that a stage's workers share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pipegraph.contracts import Context, Operator
from pipegraph.planning.plan import Plan
from pipegraph.stopping import Stopping


class OperatorContexts:
    """Makes the contexts for one loader."""

    def __init__(self, plan: Plan, memory_limit: int, seed: int, rank: int, world_size: int) -> None:
        self.plan = plan
        self.memory_limit = memory_limit
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.stopping = Stopping()
        self.counters: dict[str, dict[str, int]] = {}
        self._counting = threading.RLock()
        self._sharing = threading.RLock()
        self._shared: dict[tuple[str, str], Any] = {}

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
        read = not all(isinstance(each, Operator) and each.fetches for each in readers)
        place = stage, self.seed, self.rank, self.world_size, worker
        memory = self.plan.stages[stage].memory
        return Context(*place, self.stopping, count, share, read, memory, self.memory_limit)

    def shared(self, stage: str) -> dict[str, Any]:
        """The objects that a stage's workers share, by name; available after ``close`` too."""
        with self._sharing:
            return {name: made for (of, name), made in self._shared.items() if of == stage}
