"""Batches per second through one trainer from Ray actors: 1 KB, 1 MB and 32 MB each, against bare actor calls.

Claim: at least 0.9 of bare calls to as many actors, with as many batches at a time, read in order.

    python benchmarks/ray_calls.py --rounds 5                      # make test-ray makes an environment with Ray

Each batch is made by its actor (NumPy, all ones) and every delivered one is counted. Bare calls are given two batches
per actor at a time: one in work, one ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import Contestant
from ray_cluster import connected

SIZES = {"1 KB": (1 << 10, 200, 1000), "1 MB": (1 << 20, 30, 150), "32 MB": (32 << 20, 6, 20)}
"""Bytes, warm and timed batches."""
ACTORS = 2
AT_ONCE = 2
ENDLESS = 1 << 30
BARE = "bare actor calls"
SINGLE = "bare actor calls, one at a time"
OURS = "pipegraph"


def make(nbytes: int, index: int) -> Any:
    """A batch; ``index`` is what it stands for."""
    return np.ones(nbytes, np.uint8)


@contextmanager
def bare(nbytes: int, at_once: int) -> Iterator[Iterable[Any]]:
    """Hand-written: calls in turn, results in order."""
    import ray

    class Maker:
        def make(self, index: int) -> Any:
            return make(nbytes, index)

    actors = [ray.remote(num_cpus=1)(Maker).remote() for _ in range(ACTORS)]

    def run() -> Iterator[Any]:
        waiting: deque[Any] = deque()
        for index in range(ENDLESS):
            waiting.append(actors[index % ACTORS].make.remote(index))
            if len(waiting) >= ACTORS * at_once:
                yield ray.get(waiting.popleft())

    try:
        yield run()
    finally:
        for actor in actors:
            ray.kill(actor)


@contextmanager
def ours(nbytes: int) -> Iterator[Iterable[Any]]:
    """A stage of as many actors."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("calls")
    indices = graph.add(ops.FromSequence(range(ENDLESS)))
    indices.then(ops.Map(partial(make, nbytes)), name="make", workers=ACTORS, backend="ray")
    with graph.loader(memory_limit="2 GB") as loader:
        yield loader


def check(nbytes: int, contestant: Contestant) -> str:
    """The size of the first batches."""
    with contestant.stream() as stream:
        for number, batch in enumerate(stream):
            if batch.nbytes != nbytes or batch[-1] != 1:
                raise ValueError(f"a batch of {batch.nbytes} bytes")
            if number == 2:
                break
    return f"{nbytes} bytes"


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--size", default="", help="part of a size's name")
    options = parser.parse_args()
    with connected(ACTORS, object_store_memory=600_000_000):
        for size, (nbytes, warm, timed) in SIZES.items():
            if options.size not in size:
                continue
            contestants = [
                Contestant(BARE, partial(bare, nbytes, AT_ONCE), warm, timed),
                Contestant(SINGLE, partial(bare, nbytes, 1), warm, timed),
                Contestant(OURS, partial(ours, nbytes), warm, timed),
            ]
            harness.compare(
                f"ray_calls_{size.replace(' ', '').lower()}",
                f"batches of {size} from {ACTORS} actors: >= 0.9 of bare actor calls",
                {"bytes": nbytes, "actors": ACTORS, "at_once": AT_ONCE},
                contestants,
                partial(check, nbytes),
                [BARE, SINGLE],
                "batches",
                options,
            )


if __name__ == "__main__":
    main()
