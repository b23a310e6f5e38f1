"""Hits of the node cache's eviction against least-recently-used and the offline optimum, on plans of real orders.

Claim: with the plan at hand the cache hits as often as any cache can, and where
epochs are scans it hits many times as often as LRU.

A plan is the sequence in which one node's ranks first touch blocks, over several
epochs, as the orders give it. Contestants: ``lru``; ``plan`` with all epochs known, and with only
the rest of this epoch and the next known (what a run knows whose number of epochs it was
not told); ``optimum``, Belady's algorithm written anew with a heap. One plan is also run through a real
`NodeCache` in a temporary folder, whose count must equal the simulated one.

    python benchmarks/cache_eviction.py
"""

from __future__ import annotations

import argparse
import heapq
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np

from pipegraph.order import LaneOrder, Order, PartOrder
from pipegraph.storage.cache import Cacheable, NodeCache
from pipegraph.storage.eviction import CacheEntry, NextUse, UsePlan, eviction_order

CLAIM = "plan-based eviction hits as often as the offline optimum, on scans many times as often as LRU"
BLOCKS, SAMPLES, EPOCHS = 480, 16, 6
CAPACITIES = (0.1, 0.25, 0.5, 0.75)


class Plan(NamedTuple):
    """Block names in the order of their use, and where each epoch starts."""

    uses: list[str]
    starts: list[int]


def recorded(order: Order, world_size: int, ranks: Sequence[int], seed: int = 0) -> Plan:
    """The blocks that these ranks of a node touch, in the order of their first touch in each epoch."""
    uses: list[str] = []
    starts = []
    layout = np.full(BLOCKS, SAMPLES)
    for epoch in range(EPOCHS):
        starts.append(len(uses))
        per_rank = [
            order.indices(layout, seed=seed, epoch=epoch, rank=rank, world_size=world_size) // SAMPLES
            for rank in ranks
        ]
        touched = set()
        for step in range(max(len(blocks) for blocks in per_rank)):
            for rank, blocks in enumerate(per_rank):
                if step < len(blocks) and (rank, blocks[step]) not in touched:
                    touched.add((rank, blocks[step]))
                    uses.append(str(blocks[step]))
    return Plan(uses, starts)


def scan(epochs: int = EPOCHS) -> Plan:
    """All blocks in the same sequence in every epoch."""
    return Plan([str(b) for _ in range(epochs) for b in range(BLOCKS)], [e * BLOCKS for e in range(epochs)])


def two_jobs() -> Plan:
    """Two jobs with seeds of their own on one node: their plans side by side."""
    one, other = (recorded(LaneOrder(lanes=48), 8, range(8), seed) for seed in (1, 2))
    return Plan(
        [use for pair in zip(one.uses, other.uses, strict=False) for use in pair], [2 * s for s in one.starts]
    )


def simulate(plan: Plan, capacity: int, foresight: Callable[[int], NextUse]) -> int:
    """Hits of the cache's own eviction, entries of equal size."""
    held: dict[str, CacheEntry] = {}
    hits = 0
    for now, name in enumerate(plan.uses):
        next_use = foresight(now)
        if name in held:
            hits += 1
        elif len(held) == capacity:
            del held[eviction_order(held.values(), next_use)[0].name]
        held[name] = CacheEntry(name, 1, now)
    return hits


def blind(now: int) -> NextUse:
    return lambda name: math.inf


def knowing(plan: Plan, epochs: int) -> Callable[[int], NextUse]:
    """Foresight of the rest of this epoch and `epochs - 1` more."""
    known = UsePlan(plan.uses)
    ends = [*plan.starts[1:], len(plan.uses)]

    def at(now: int) -> NextUse:
        known.advance(now)
        epoch = next(i for i, end in enumerate(ends) if now < end)
        horizon = ends[min(epoch + epochs - 1, len(ends) - 1)] - now

        def next_use(name: str) -> float:
            steps = known.next_use(name)
            return steps if steps < horizon else math.inf

        return next_use

    return at


def optimum(uses: Sequence[str], capacity: int) -> int:
    """Belady's optimum: evict the entry whose next use is farthest."""
    following = [len(uses)] * len(uses)
    last: dict[str, int] = {}
    for at in reversed(range(len(uses))):
        following[at] = last.get(uses[at], len(uses))
        last[uses[at]] = at
    held: dict[str, int] = {}
    farthest: list[tuple[int, str]] = []
    hits = 0
    for at, name in enumerate(uses):
        if name in held:
            hits += 1
        elif len(held) == capacity:
            while True:
                steps, out = heapq.heappop(farthest)
                if held.get(out) == -steps:  # older notes are stale
                    del held[out]
                    break
        held[name] = following[at]
        heapq.heappush(farthest, (-following[at], name))
    return hits


def real_cache(plan: Plan, capacity: int) -> int:
    """Hits of a `NodeCache` on disk, entries of 1,000 bytes."""
    known = UsePlan([Cacheable(f"block://{name}", 1000).name for name in plan.uses])
    with (
        tempfile.TemporaryDirectory() as folder,
        NodeCache(Path(folder) / "cache", capacity * 1000, next_use=known.next_use) as cache,
    ):
        for now, name in enumerate(plan.uses):
            known.advance(now)
            cache.fetch(
                Cacheable(f"block://{name}", 1000), lambda sink: sink.write_at(0, bytes(1000))
            ).close()
        return cache.stats.hits


def main(options: argparse.Namespace) -> None:
    plans = {
        "lanes, 8 of 8 ranks": recorded(LaneOrder(lanes=48), 8, range(8)),
        "lanes, 8 of 16 ranks": recorded(LaneOrder(lanes=48), 16, range(8)),
        "parts, 8 of 16 ranks": recorded(PartOrder(), 16, range(8)),
        "scan in one sequence": scan(),
        "two jobs, 8 ranks each": two_jobs(),
    }
    configuration = {"blocks": BLOCKS, "epochs": EPOCHS, "capacities": CAPACITIES, "plans": list(plans)}
    harness.header(CLAIM, configuration)
    rows, results = [], {}
    for name, plan in plans.items():
        for share in CAPACITIES:
            capacity = int(BLOCKS * share)
            hits = {
                "lru": simulate(plan, capacity, blind),
                "plan, this epoch and the next": simulate(plan, capacity, knowing(plan, 2)),
                "plan, all epochs": simulate(plan, capacity, knowing(plan, EPOCHS)),
                "optimum": optimum(plan.uses, capacity),
            }
            results[f"{name}, {share:.0%}"] = {"uses": len(plan.uses), **hits}
            rows.append([name, f"{share:.0%}", *(f"{n / len(plan.uses):.1%}" for n in hits.values())])
    print(harness.table(["plan", "cache/data", *hits], rows))
    plan, capacity = plans["lanes, 8 of 16 ranks"], BLOCKS // 4
    on_disk = real_cache(plan, capacity)
    expected = results["lanes, 8 of 16 ranks, 25%"]["plan, all epochs"]
    print(f"check: NodeCache on disk hit {on_disk} times, simulated {expected}")
    if on_disk != expected:
        raise SystemExit("the cache on disk does not do what its simulation does")
    if not options.no_record:
        print("recorded in", harness.record("cache_eviction", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main(harness.arguments(__doc__, rounds=1).parse_args())
