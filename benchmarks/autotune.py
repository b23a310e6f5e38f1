"""From one worker everywhere: how near the tuner comes to the best setting of a grid search, and how soon.

Claim: on pipelines of planted costs (waits, as of storage) at least 95 % of the grid search's best within 30 s.

The tuner's final sizes and the best of the grid are then run in turn, and compared by ratios.

    python benchmarks/autotune.py --seconds 30 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice, product

import harness

import pipegraph as pg
from pipegraph import operators as ops

CLAIM = "the tuner reaches at least 95 % of the grid search's best on pipelines of planted costs"

PIPELINES = {
    "one slow stage": (0.004, 0.032, 0.002),
    "two alike": (0.016, 0.016, 0.002),
    "a slope": (0.004, 0.008, 0.016),
}
"""Seconds per item of three stages in a row."""

GRID = (1, 2, 4, 8, 16, 32)
BATCH = 4


class Waits:
    """Takes its time without a core, as storage does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, item: int) -> int:
        time.sleep(self.seconds)
        return item


def graph_of(costs: tuple[float, ...]) -> pg.Graph:
    """A source, a stage per cost, and batches."""
    graph = pg.Graph("planted")
    node = graph.add(ops.FromSequence(range(10**7)), name="read")
    for number, seconds in enumerate(costs):
        node = node.then(Waits(seconds), name=f"stage-{number}")
    node.then(ops.Batch(BATCH), name="batch")
    return graph


def rate(graph: pg.Graph, step_s: float, batches: int = 60) -> float:
    """Batches per second once the queues have filled."""
    with graph.loader() as loader:
        items = iter(loader)
        for _ in islice(items, batches // 2):
            time.sleep(step_s)
        begun = time.perf_counter()
        for _ in islice(items, batches):
            time.sleep(step_s)
        return batches / (time.perf_counter() - begun)


def tuned(costs: tuple[float, ...], step_s: float, seconds: float) -> pg.Tuning:
    """What the tuner finds in so many seconds."""
    with graph_of(costs).loader(autotune=True) as loader:
        begun = time.perf_counter()
        for _ in loader:
            time.sleep(step_s)
            if time.perf_counter() - begun > seconds:
                break
        return loader.tuning()


def placed(costs: tuple[float, ...], settings: dict[str, dict[str, int]]) -> pg.Graph:
    """The graph with these sizes."""
    graph = graph_of(costs)
    graph.resize(settings)
    return graph


def main() -> None:
    """Print a line per pipeline."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=30.0)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--step-ms", type=float, default=4.0)
    asked.add_argument("--no-record", action="store_true", help="print only")
    options = asked.parse_args()
    results = {}
    step_s = options.step_ms / 1000
    for name, costs in PIPELINES.items():
        found = tuned(costs, step_s, options.seconds)
        grid = [
            {f"stage-{number}": {"workers": n} for number, n in enumerate(workers)}
            for workers in product(GRID, repeat=len(costs))
            if _sensible(workers, costs)
        ]
        best = max(grid, key=lambda settings: rate(placed(costs, settings), step_s, 30))
        ratios = []
        for _ in range(options.rounds):
            ours = rate(placed(costs, found.settings), step_s)
            ratios.append(ours / rate(placed(costs, best), step_s))
        results[name] = {
            "of the best": round(statistics.median(ratios), 4),
            "from": round(min(ratios), 4),
            "to": round(max(ratios), 4),
            "decisions": len(found.decisions),
        }
        print(
            f"{name}: {statistics.median(ratios):.3f} of the best of {len(grid)} settings "
            f"({min(ratios):.3f}-{max(ratios):.3f}); {len(found.decisions)} decisions; best {best}"
        )
        print(found)
    if not options.no_record:
        configuration = {"seconds": options.seconds, "rounds": options.rounds, "step_ms": options.step_ms}
        print("recorded in", harness.record("autotune", CLAIM, configuration, results).name)


def _sensible(workers: tuple[int, ...], costs: tuple[float, ...]) -> bool:
    """Leaves out settings that give a stage three times the workers per second of work that another has."""
    shares = [n / cost for n, cost in zip(workers, costs, strict=True)]
    return max(shares) <= 4 * min(shares)


if __name__ == "__main__":
    main()
