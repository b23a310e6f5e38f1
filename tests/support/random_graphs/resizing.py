"""Changing the size of stages at random while a loader delivers."""

from __future__ import annotations

import random
from typing import Any, final

from pipegraph.engine.runtime import Runtime
from pipegraph.graph import Graph
from pipegraph.loader.loader import Loader

MAX_WORKERS = 5


@final
class RandomSizes:
    """Gives a random stage another number of workers and another capacity before each chunk is taken.

    Put in place of the tuner of a loader with ``autotune=True``.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._runtime: Any = None

    def begins(self, loader: Any, runtime: Runtime) -> None:
        """A pass begins."""
        self._runtime = runtime

    def asked(self) -> None:
        """Before a chunk is taken."""
        staffing, draw = self._runtime.staffing, self._random
        stages = [stage for stage in self._runtime.plan.running if stage.tuned]
        if stages:
            stage = draw.choice(stages)
            if "workers" in stage.tuned:
                staffing.resize(stage.name, draw.randint(1, MAX_WORKERS))
            staffing.set_capacity(stage.name, draw.randint(1, 2 * stage.capacity))


def resized_loader(graph: Graph, output: Any = None, seed: int = 0, **options: Any) -> Loader:
    """A loader whose stages change their size at random all the time."""
    loader = graph.loader(output, autotune=True, **options)
    loader._tuner = RandomSizes(seed)
    return loader
