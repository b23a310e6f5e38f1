"""What it buys that neighbouring process stages run in the same processes, against the same stages apart.

Claim: two and three stages of 0.1 ms in a run are at least as fast as apart, and with 1 MB arrays between them faster.

    python benchmarks/process_runs.py --rounds 5

Apart are the same stages with timeouts that differ by a second of a thousand, which nothing reaches. Two workers each:
two processes in a run, and two for each stage apart. On a busy machine whoever has more processes gets more of its
cores, which says nothing of either; so a run with as many processes in all as apart is timed beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import Contestant
from images import one_thread_each
from python_transform import Transform, calibrated

CLAIM = "stages of 0.1 ms in one run: no slower than apart; with 1 MB arrays between them: faster"
WORKERS = 2
ENDLESS = 1 << 30
MB = 1 << 20


@dataclass(frozen=True)
class Again:
    """A transform of what a transform has made."""

    work: Transform

    def __call__(self, made: Any) -> Any:
        return self.work(int(made[0]))


def made(index: int) -> Any:
    """The array of an item."""
    return np.full(MB, index % 251, np.uint8)


def passed_on(array: Any) -> Any:
    """Another array of the same size."""
    return array + np.uint8(1)


def total(array: Any) -> int:
    """What is left of it."""
    return int(array[0]) + int(array[-1])


@contextmanager
def stream(functions: tuple[Callable[[Any], Any], ...], apart: bool, workers: int) -> Iterator[Any]:
    """A chain of process stages."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("runs")
    node = graph.add(ops.FromIterable(range(ENDLESS)))
    for number, function in enumerate(functions):
        timeout = 1000.0 + number * apart
        node = node.then(function, name=f"s{number}", workers=workers, backend="process", timeout=timeout)
    with graph.loader() as loader:
        assert bool(loader.plan.stages["s0"].followers) is not apart
        yield loader


def check(functions: tuple[Callable[[Any], Any], ...], contestant: Contestant) -> str:
    """The first items must be those of the functions one after the other."""
    from pipegraph.testing.outcome import fingerprint

    with contestant.stream() as items:
        found = [item for item, _ in zip(items, range(4), strict=False)]
    wanted = []
    for item in range(4):
        value: Any = item
        for function in functions:
            value = function(value)
        wanted.append(value)
    if fingerprint(found) != fingerprint(wanted):
        raise RuntimeError(f"{contestant.name}: other items")
    return "equal"


def chains() -> dict[str, tuple[tuple[Callable[[Any], Any], ...], int]]:
    """The functions of each chain, and how many items to time."""
    work: Transform = calibrated(0.1)
    return {
        "2 stages of 0.1 ms": ((work, Again(work)), 4000),
        "3 stages of 0.1 ms": ((work, Again(work), Again(work)), 4000),
        "2 stages, 1 MB between": ((made, total), 1000),
        "3 stages, 1 MB between": ((made, passed_on, total), 1000),
    }


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--chain", default="", help="part of a chain's name")
    options = parser.parse_args()
    one_thread_each()
    for name, (functions, items) in chains().items():
        if options.chain not in name:
            continue
        contestants = [
            Contestant(title, partial(stream, functions, apart, workers), items // 4, items)
            for title, apart, workers in (
                ("one run", False, WORKERS),
                ("one run, as many processes as apart", False, WORKERS * len(functions)),
                ("apart", True, WORKERS),
            )
        ]
        configuration = {"chain": name, "workers": WORKERS, "rounds": options.rounds}
        harness.compare(
            "process_runs", CLAIM, configuration, contestants, partial(check, functions), ["apart"], "items", options
        )  # fmt: skip


if __name__ == "__main__":
    main()
