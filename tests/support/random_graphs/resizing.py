"""Changing the size of stages at random while a loader delivers."""

from __future__ import annotations

import random
from typing import Any, final

from pipegraph.engine.crew import Crew
from pipegraph.graph import Graph
from pipegraph.loader.loader import Loader
from pipegraph.profile.search import Tuning

MAX_WORKERS = 5


@final
class RandomSizes:
    """Gives a random stage another number of workers and another capacity before each chunk is taken.

    Put in place of the tuner of a loader with ``autotune=True``.
    """

    tuning = Tuning()

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._stages: list[Any] = []
        self._crew: Any = None

    def begins(self, loader: Any, crew: Crew) -> None:
        """A pass begins."""
        self._stages = [stage for stage in loader.plan.running if stage.tuned]
        self._crew = crew

    def asked(self, items: int) -> None:
        """Before a chunk is taken."""
        crew, draw, stages = self._crew, self._random, self._stages
        if stages:
            stage = draw.choice(stages)
            if "workers" in stage.tuned:
                crew.resize(stage.name, draw.randint(1, MAX_WORKERS))
            crew.set_capacity(stage.name, draw.randint(1, 2 * stage.capacity))


def resized_loader(graph: Graph, output: Any = None, seed: int = 0, **options: Any) -> Loader:
    """A loader whose stages change their size at random all the time."""
    loader = graph.loader(output, autotune=True, **options)
    loader._tuner = RandomSizes(seed)
    return loader
