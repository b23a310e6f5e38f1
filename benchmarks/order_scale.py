"""A 2.5-billion-sample epoch in 16,000 parts: what an order costs a rank.

Claim: to plan the epoch, to find a position in its middle, and to resume at another world size each take
under 100 ms and 200 MB per rank; a rank's next 10,000 positions take under 50 ms.

Every repeat takes an epoch that was not prepared before, so that nothing comes from a memo but what a
rank's first draw has put there. Memory is the peak that Python and numpy allocate (tracemalloc), in a
separate pass, as tracing slows the rest.

``StridedOrder`` and ``BlockOrder(compat=True)`` are left out: equal to torch's classes index for index,
they hold a permutation of all samples.

    python benchmarks/order_scale.py
"""

from __future__ import annotations

import dataclasses
import functools
import time
import tracemalloc
from collections.abc import Callable, Sequence

import harness
import numpy as np
import numpy.typing as npt

from pipegraph.order import BlockOrder, LaneOrder, LayoutLike, Order, PartOrder

SAMPLES, PARTS, BLOCKS_PER_PART = 2_500_000_000, 16_000, 125
CLAIM = "2.5 billion samples in 16,000 parts: plan, position, resume < 100 ms, < 200 MB; next 10,000 < 50 ms"

Int64Array = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """Parts of 16 GB in blocks of 128 MB."""

    part_samples: Int64Array
    block_samples: Int64Array
    digest: str = "2.5 billion"


def unequal(total: int, pieces: int, seed: int) -> Int64Array:
    """``total`` cut into pieces that differ by up to a tenth of their mean."""
    weight = np.random.default_rng(seed).uniform(0.9, 1.1, pieces)
    ends = np.round(np.cumsum(weight) / weight.sum() * total).astype(np.int64)
    return np.diff(ends, prepend=0)


def layouts() -> dict[str, LayoutLike]:
    """16,000 parts, as a plain array and as a manifest of two million blocks."""
    blocks = unequal(SAMPLES, PARTS * BLOCKS_PER_PART, 1)
    parts = blocks.reshape(PARTS, BLOCKS_PER_PART).sum(axis=1)
    return {"16,000 parts": parts, "2,000,000 blocks": Manifest(parts, blocks)}


Job = Callable[[int, int], object]


def jobs(order: Order, layout: LayoutLike, world_size: int) -> tuple[dict[str, Job], dict[str, Job]]:
    """What is measured, as functions of the epoch and of the turn: cold ones, and draws that continue."""
    rank, middle = world_size // 3, SAMPLES // world_size // 2
    resized = [(world_size * 3 + 1, middle // 4), (5, 1_000)]
    draw = functools.partial(order.indices, layout, 7, rank=rank, world_size=world_size)

    def plan(epoch: int, turn: int) -> object:
        return order.length(layout, world_size, seed=7, epoch=epoch), draw(epoch=epoch, start=0, stop=1)

    def position(epoch: int, turn: int) -> object:
        return draw(epoch=epoch, start=middle, stop=middle + 1)

    def resume(epoch: int, turn: int) -> object:
        return draw(epoch=epoch, start=0, stop=1, history=resized)

    def following(samples: int) -> Job:
        return lambda epoch, turn: draw(
            epoch=epoch, start=middle + turn * samples, stop=middle + (turn + 1) * samples
        )

    cold = {"plan": plan, "position": position, "resume": resume}
    return cold, {"next 10,000": following(10_000), "next 1,000": following(1_000)}


def milliseconds(job: Job, epochs: Sequence[int]) -> harness.Spread:
    """Wall time, one turn per epoch."""
    taken = []
    for turn, epoch in enumerate(epochs):
        start = time.perf_counter()
        job(epoch, turn)
        taken.append((time.perf_counter() - start) * 1e3)
    return harness.spread(taken)


def peak_megabytes(job: Job, epoch: int) -> float:
    """The most that is allocated beyond what was there before."""
    tracemalloc.start()
    job(epoch, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def measure(order: Order, layout: LayoutLike, world_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each job, and the peak of the cold ones."""
    cold, draws = jobs(order, layout, world_size)
    results = {
        name: milliseconds(job, range(number * rounds, (number + 1) * rounds))
        for number, (name, job) in enumerate(cold.items())
    }
    prepared = len(cold) * rounds
    next(iter(cold.values()))(prepared, 0)
    results |= {name: milliseconds(job, [prepared] * rounds) for name, job in draws.items()}
    row = {name: spread.to_dict() for name, spread in results.items()}
    peaks = [peak_megabytes(job, prepared + 1 + i) for i, job in enumerate(cold.values())]
    row["peak_mb"] = {"median": round(max(peaks), 1)}
    return row


def main() -> None:
    options = harness.arguments(__doc__ or "", rounds=9).parse_args()
    configuration = {
        "samples": SAMPLES,
        "parts": PARTS,
        "blocks": PARTS * BLOCKS_PER_PART,
        "rounds": options.rounds,
    }
    harness.header(CLAIM, configuration)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for layout_name, layout in layouts().items():
        for order in (LaneOrder(), LaneOrder(window=4), PartOrder(), BlockOrder()):
            for world_size in (16, 7, 4_096):
                name = f"{type(order).__name__}"
                if isinstance(order, LaneOrder) and order.window > 1:
                    name += f"(window={order.window})"
                key = f"{name}, {layout_name}, {world_size} ranks"
                results[key] = measure(order, layout, world_size, options.rounds)
    columns = list(next(iter(results.values())))
    rows = [[key, *(f"{row[c]['median']:.3g}" for c in columns)] for key, row in results.items()]
    print(harness.table(["milliseconds (median)", *columns], rows))
    if not options.no_record:
        print(harness.record("order_scale", CLAIM, configuration, results))


if __name__ == "__main__":
    main()
