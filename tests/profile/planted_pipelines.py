"""Pipelines with a planted bottleneck: what holds them back is known, since it was put there.

Costs are sleeps: a simulated cost takes its time without a core and without the interpreter lock. Only where cores or
the lock are planted does a stage compute.
"""

import hashlib
import random
import time
from dataclasses import dataclass, field, replace

import pipegraph as pg
from pipegraph import operators as ops

CYCLE_S = 0.012
"""Seconds per item that the planted bottleneck allows."""

ITEMS = 80
BLOCK = bytes(6_000_000)


class Sleeps:
    """A function that takes this long for an item, without a core."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, item):
        time.sleep(self.seconds)
        return item


class Hashes:
    """A function that computes without the interpreter lock."""

    def __init__(self, seconds):
        self.rounds = max(1, round(seconds / 0.004))

    def __call__(self, item):
        for _ in range(self.rounds):
            hashlib.sha256(BLOCK).digest()
        return item


class Loops:
    """A function that computes in Python, holding the interpreter lock."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, item):
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return item


class Stored:
    """A data set that takes this long to read an item."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index


@dataclass(frozen=True)
class Stage:
    """``function(seconds)`` with so many workers."""

    seconds: float
    workers: int = 1
    backend: str = "thread"
    function: type = Sleeps
    capacity: int = 8


@dataclass(frozen=True)
class Pipeline:
    """``stages`` by name; what is planted, and where."""

    kind: str
    shape: str
    planted: str
    step_s: float
    stages: dict = field(default_factory=dict)

    def graph(self):
        graph = pg.Graph("planted")

        def add(name, *upstream):
            stage = self.stages[name]
            options = {"name": name, "workers": stage.workers, "capacity": stage.capacity}
            if not upstream:
                return graph.add(ops.FromSequence(Stored(stage.seconds)), **options)
            return upstream[0].then(stage.function(stage.seconds), backend=stage.backend, **options)

        node = add("read")
        if self.shape == "linear":
            for name in ("first", "second", "third"):
                node = add(name, node)
        elif self.shape == "fan-out":
            node = graph.add(ops.Zip(), add("first", node), add("second", node), name="zip")
            node = add("third", node)
        else:
            other = graph.add(ops.FromIterable(range(ITEMS)), name="other")
            node = graph.add(ops.Zip(), add("first", node), add("second", other), name="zip")
            node = add("third", node)
        return graph

    def run(self):
        with self.graph().loader() as loader:
            for _ in loader:
                if self.step_s:
                    time.sleep(self.step_s)
            return loader.profile()

    def changed(self, name, **changes):
        return replace(self, stages={**self.stages, name: replace(self.stages[name], **changes)})


def draw(seed):
    """The pipeline of a seed."""
    rng = random.Random(seed)
    kind = ("stage", "storage", "consumer", "cores", "lock")[seed % 5]
    shape = ("linear", "fan-in", "fan-out")[seed // 5 % 3]
    names = ["read", "first", "second", "third"]
    planted = {"storage": "read", "consumer": "consumer"}.get(kind, rng.choice(names[1:]))
    stages = {}
    for name in names:
        workers = rng.randint(1, 3)
        seconds = rng.uniform(0.05, 0.55) * CYCLE_S * workers
        processes = kind in ("stage", "storage", "consumer") and name != "read" and rng.random() < 0.2
        stages[name] = Stage(
            seconds, workers, "process" if processes else "thread", Sleeps, rng.randint(4, 12)
        )
    step_s = rng.uniform(0.05, 0.55) * CYCLE_S
    if kind == "consumer":
        step_s = CYCLE_S
    elif kind == "cores":
        stages[planted] = Stage(0.024, 4, "thread", Hashes, 8)
    elif kind == "lock":
        stages[planted] = Stage(CYCLE_S, rng.randint(2, 3), "thread", Loops, 8)
    else:
        stages[planted] = replace(stages[planted], seconds=CYCLE_S * stages[planted].workers)
    return Pipeline(kind, shape, planted, step_s, stages)
