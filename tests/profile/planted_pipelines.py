"""Pipelines with a planted bottleneck: what holds them back is known, since it was put there.

Costs are waits: a simulated cost takes its time without a core and without the GIL. Only where cores or
the lock are planted does a stage compute.
"""

import hashlib
import random
import threading
import time
from dataclasses import dataclass, field, replace

import pipegraph as pg
from pipegraph import operators as ops

CYCLE_S = 0.012
"""Seconds per item that the planted bottleneck allows."""

ITEMS = 80
BLOCK = bytes(6_000_000)
TRIES = 5


lateness = threading.local()


def wait(seconds):
    """Wait so that the calling thread's waits take this long on average, also on a machine that is busy.

    By how much one of them ends late is taken off the next ones.
    """
    late = getattr(lateness, "seconds", 0.0)
    begun = time.perf_counter()
    if late < seconds:
        time.sleep(seconds - late)
    lateness.seconds = late + time.perf_counter() - begun - seconds


class Sleeps:
    """A function that takes this long for an item, without a core."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, item):
        wait(self.seconds)
        return item


class Hashes:
    """A function that computes without the GIL."""

    def __init__(self, seconds):
        self.rounds = max(1, round(seconds / 0.004))

    def __call__(self, item):
        for _ in range(self.rounds):
            hashlib.sha256(BLOCK).digest()
        return item


class Loops:
    """A function that computes in Python, holding the GIL."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, item):
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return item


class Stored:
    """A dataset that takes this long to read an item."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        wait(self.seconds)
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
        lateness.seconds = 0.0
        with self.graph().loader() as loader:
            for _ in loader:
                if self.step_s:
                    wait(self.step_s)
            return loader.profile()

    def run_as_planted(self):
        """The profile of a run in which what is planted did set the pace, by the work that was measured.

        Other programs make stages slower at random, processes most of all: then another one sets the pace. Such a run
        is repeated.
        """
        for _ in range(TRIES):
            found = self.run()
            busy = {name: stage.busy for name, stage in found.stages.items()}
            busy["consumer"] = 1 - found.stall_s / found.elapsed_s
            if busy.pop(self.planted) > max(busy.values()):
                return found
        raise AssertionError(f"this machine is too busy: in {TRIES} runs never as planted: {self}\n{found}")


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
