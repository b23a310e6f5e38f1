"""From one worker everywhere: how near the tuner comes to the best setting of a grid search, and what it must not do.

Claim: on pipelines of planted costs (waits, as of storage) at least 95 % of the grid search's best within 30 s; budgets
are never exceeded; a stage that holds the GIL gets no more threads.

Planted costs need no core, and how late a wait ends is taken off the next one, so that other load hardly matters. The
tuner's final sizes and the best of the grid are run in turn, and compared by ratios.

    python benchmarks/autotune.py --seconds 30 --rounds 3
    python benchmarks/autotune.py --only lock,budgets
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, product
from typing import Any

import harness
import numpy as np

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.machine import cores
from pipegraph.profile.model import Limits

CLAIM = "the tuner reaches at least 95 % of the grid search's best on pipelines of planted costs"

PIPELINES = {
    "one slow stage": (0.008, 0.064, 0.004),
    "two alike": (0.032, 0.032, 0.004),
    "a slope": (0.008, 0.016, 0.032),
}
"""Seconds per item of three stages in a row."""

GRID = (1, 2, 4, 8, 16, 32)
BATCH = 4
NEAR = 0.9
"""Settings whose slowest stage alone keeps them below this part of the best are not run: they cannot be the best."""

MEGABYTE = 1 << 20
LIMIT = 64 * MEGABYTE

_late = threading.local()


def wait(seconds: float) -> None:
    """Wait without a core; how late the last waits of this thread ended is taken off."""
    late = getattr(_late, "seconds", 0.0)
    begun = time.perf_counter()
    if late < seconds:
        time.sleep(seconds - late)
    _late.seconds = late + time.perf_counter() - begun - seconds


class Waits:
    """Takes its time without a core, as storage does; what it makes is as large as asked for."""

    lock = threading.Lock()
    working = most = 0  # calls at once, of all stages

    def __init__(self, seconds: float, nbytes: int = 0) -> None:
        self.seconds = seconds
        self.nbytes = nbytes

    def __call__(self, item: Any) -> Any:
        with Waits.lock:
            Waits.working += 1
            Waits.most = max(Waits.most, Waits.working)
        wait(self.seconds)
        with Waits.lock:
            Waits.working -= 1
        return np.empty(self.nbytes, np.uint8) if self.nbytes else item


def loops(item: int) -> int:
    """Two milliseconds of Python, which hold the GIL."""
    until = time.thread_time() + 0.002
    while time.thread_time() < until:
        pass
    return item


def graph_of(functions: Sequence[Callable[[Any], Any]], settings: Any = None) -> pg.Graph:
    """A source, a stage per function, and batches."""
    graph = pg.Graph("planted")
    node = graph.add(ops.FromSequence(range(10**7)), name="read")
    for number, function in enumerate(functions):
        node = node.then(function, name=f"stage-{number}")
    node.then(ops.Batch(BATCH), name="batch")
    graph.resize(settings or {})
    return graph


def planted(costs: Sequence[float], settings: Any = None) -> pg.Graph:
    """A pipeline of these costs."""
    return graph_of([Waits(seconds) for seconds in costs], settings)


def rate(graph: pg.Graph, step_s: float, batches: int = 80, **options: Any) -> float:
    """Batches per second once the queues have filled."""
    with graph.loader(**options) as loader:
        items = iter(loader)
        for _ in islice(items, batches // 2):
            wait(step_s)
        begun = time.perf_counter()
        for _ in islice(items, batches):
            wait(step_s)
        return batches / (time.perf_counter() - begun)


def train(batches: Iterable[Any], step_s: float, seconds: float) -> float:
    """Train for so long; returns batches per second in the last fifth of it."""
    begun, counted, since = time.perf_counter(), 0, 0.0
    for _ in batches:
        wait(step_s)
        now = time.perf_counter() - begun
        if now > seconds:
            return counted / (now - since)
        if now > 0.8 * seconds:
            since = since or now
            counted += 1
    raise RuntimeError("the data ended")


def beside(
    make: Callable[[Any], pg.Graph],
    grid: Sequence[Any],
    step_s: float,
    seconds: float,
    rounds: int,
    **options: Any,
) -> dict[str, Any]:
    """The tuner's sizes beside the best of a grid."""
    with make(None).loader(autotune=True, **options) as loader:
        train(loader, step_s, seconds)
        found = loader.tuning()
    print(found)
    best = max(grid, key=lambda settings: rate(make(settings), step_s, 40, **options))
    ratios = []
    for _ in range(rounds):
        ours = rate(make(found.settings), step_s, **options)
        ratios.append(ours / rate(make(best), step_s, **options))
    return {
        "of the best": statistics.median(ratios),
        "from": min(ratios),
        "to": max(ratios),
        "best": str(best),
        "settings in the grid": len(grid),
        "decisions": len(found.decisions),
        "stopped by": found.limit,
    }


class Files:
    """A dataset of slow files: 0.1 s each, without a core."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> int:
        wait(0.1)
        return index


def files(settings: Any) -> pg.Graph:
    """Slow files, and batches."""
    graph = pg.Graph("files")
    graph.add(ops.FromSequence(Files()), name="read").then(ops.Batch(BATCH), name="batch")
    graph.resize(settings or {})
    return graph


def processes(settings: Any) -> pg.Graph:
    """Python in worker processes."""
    graph = pg.Graph("processes")
    node = graph.add(ops.FromSequence(range(10**7)), name="read")
    node.then(loops, name="loops", backend="process").then(ops.Batch(BATCH), name="batch")
    graph.resize(settings or {})
    return graph


def large(settings: Any) -> pg.Graph:
    """Samples of a megabyte each."""
    return graph_of([Waits(0.1, MEGABYTE)], settings)


def against_the_grid(costs: tuple[float, ...], step_s: float, seconds: float, rounds: int) -> dict[str, Any]:
    """The same on planted costs."""

    def bound(workers: Sequence[int]) -> float:
        stages = (n / cost / BATCH for n, cost in zip(workers, costs, strict=True))
        return min(1 / step_s, *stages)

    every = list(product(GRID, repeat=len(costs)))
    most = max(bound(workers) for workers in every)
    grid = [
        {f"stage-{number}": {"workers": n} for number, n in enumerate(workers)}
        for workers in every
        if bound(workers) >= NEAR * most
    ]
    return beside(lambda settings: planted(costs, settings), grid, step_s, seconds, rounds)


def budgets(seconds: float) -> dict[str, Any]:
    """Large samples, an expensive stage and a small memory limit: the most that was ever held and at work."""
    Waits.most = 0
    with graph_of([Waits(0.1, MEGABYTE)]).loader(autotune=True, memory_limit=LIMIT) as loader:
        train(loader, 0.0, seconds)
        found, workers = loader.profile(), loader.tuning().settings["stage-0"]["workers"]
    most = Limits(cores()).threads
    assert found.memory_peak_bytes <= LIMIT
    assert Waits.most <= most
    result = {"bytes held": found.memory_peak_bytes, "limit": LIMIT, "workers": workers}
    Waits.most = 0
    with planted((0.06, 0.03)).loader(autotune=True) as loader:
        train(loader, 0.0, seconds)
    assert Waits.most <= most
    return result | {"at work at once": Waits.most, "workers allowed": most}


def lock(seconds: float) -> dict[str, Any]:
    """A stage of plain Python."""
    with graph_of([loops]).loader(autotune=True) as loader:
        train(loader, 0.0, seconds)
        found = loader.tuning()
    print(found.story)
    proposed = any("stage-0" in each and "process" in each for each in found.advice)
    return {"workers": found.settings["stage-0"]["workers"], "proposes processes": proposed}


def main() -> None:
    """Print a line per part."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=30.0)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--step-ms", type=float, default=8.0)
    asked.add_argument("--only", default="grid,files,processes,memory,budgets,lock")
    asked.add_argument("--no-record", action="store_true", help="print only")
    options = asked.parse_args()
    step_s, seconds = options.step_ms / 1000, options.seconds
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, costs in PIPELINES.items():
        parts[f"grid: {name}"] = lambda costs=costs: against_the_grid(costs, step_s, seconds, options.rounds)

    def sizes(stage: str, workers: Sequence[int]) -> list[Any]:
        return [{stage: {"workers": n}} for n in workers]

    most: dict[str, tuple[Callable[[Any], pg.Graph], Sequence[Any], float, dict[str, Any]]] = {
        "files": (files, sizes("read", (16, 32, 64, 128, 192)), 0.003, {}),
        "processes": (processes, sizes("loops", (1, 2, 3, 4)), 0.0, {}),
        "memory": (large, sizes("stage-0", (8, 16, 32, 40, 48, 56)), step_s, {"memory_limit": LIMIT}),
    }
    for name, (make, grid, step, limits) in most.items():
        parts[name] = lambda make=make, grid=grid, step=step, limits=limits: beside(
            make, grid, step, seconds, options.rounds, **limits
        )
    parts["budgets"] = lambda: budgets(seconds / 2)
    parts["lock"] = lambda: lock(seconds / 2)
    results = {}
    for name, part in parts.items():
        if name.partition(":")[0] in options.only.split(","):
            results[name] = {
                what: round(each, 4) if isinstance(each, float) else each for what, each in part().items()
            }
            print(f"{name}: {', '.join(f'{what} {each}' for what, each in results[name].items())}\n")
    if not options.no_record:
        configuration = {"seconds": seconds, "rounds": options.rounds, "step_ms": options.step_ms}
        print("recorded in", harness.record("autotune", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
