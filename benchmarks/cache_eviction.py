"""Hits of the node cache's eviction against least-recently-used and the offline optimum, on plans of real orders.

Claim: with the plan at hand the cache hits as often as any cache can, and where
epochs are scans it hits many times as often as LRU.

A plan is the sequence in which one node's ranks touch blocks, over several epochs, as the orders give it; what a
rank touched less than eight steps ago is open still. Contestants: ``lru``; ``reader``, the next_uses that ``Load``
gives its cache: intervals of steps in this epoch and the next, of orders that shuffle single samples the next steps;
``plan`` with the whole sequence of this epoch and the next known, and with that of all epochs; ``optimum``, Belady's
algorithm written anew with a heap. One plan is also run through a real `NodeCache` in a temporary
folder, whose count must be within a hundredth of the simulated one.

    python benchmarks/cache_eviction.py
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import harness
import numpy as np

from pipegraph.order import BlockOrder, LaneOrder, Order, PartOrder, StridedOrder
from pipegraph.reader.next_use import NextUseIndex
from pipegraph.reader.schedule import RankSteps
from pipegraph.storage import Manifest, Part
from pipegraph.storage.formats import Block
from pipegraph.storage.manifest import PartIndex
from pipegraph.storage.node_cache import Cacheable, NodeCache
from pipegraph.storage.space import CacheEntry, NextUse, eviction_order

CLAIM = "plan-based eviction hits as often as the offline optimum, on scans many times as often as LRU"
BLOCKS, SAMPLES, EPOCHS = 480, 16, 6
OPEN = 8
CAPACITIES = (0.1, 0.25, 0.5, 0.75)


class Plan(NamedTuple):
    """Block names in the order of their use, and where each epoch starts.

    ``steps`` holds the step of each use, and ``order`` what gives the plan (with the number of ranks, and those
    of the node), where it is that of one order alone.
    """

    uses: list[str]
    starts: list[int]
    steps: list[int]
    order: tuple[Order, int, range] | None


def recorded(order: Order, world_size: int, ranks: range, seed: int = 0) -> Plan:
    """The blocks that these ranks of a node open, step by step."""
    uses: list[str] = []
    starts, steps = [], []
    layout = np.full(BLOCKS, SAMPLES)
    for epoch in range(EPOCHS):
        starts.append(len(uses))
        per_rank = [
            order.indices(layout, seed=seed, epoch=epoch, rank=rank, world_size=world_size) // SAMPLES
            for rank in ranks
        ]
        last: dict[tuple[int, int], int] = {}
        for step in range(max(len(blocks) for blocks in per_rank)):
            for rank, blocks in enumerate(per_rank):
                if step < len(blocks):
                    if step - last.get((rank, blocks[step]), -OPEN) >= OPEN:
                        uses.append(str(blocks[step]))
                        steps.append(step)
                    last[rank, blocks[step]] = step
    return Plan(uses, starts, steps, (order, world_size, ranks))


def scan(epochs: int = EPOCHS) -> Plan:
    """All blocks in the same sequence in every epoch."""
    uses = [str(b) for _ in range(epochs) for b in range(BLOCKS)]
    return Plan(uses, [e * BLOCKS for e in range(epochs)], [0] * len(uses), None)


def two_jobs() -> Plan:
    """Two jobs with seeds of their own on one node: their plans side by side."""
    one, other = (recorded(LaneOrder(lanes=48), 8, range(8), seed) for seed in (1, 2))
    uses = [use for pair in zip(one.uses, other.uses, strict=False) for use in pair]
    return Plan(uses, [2 * s for s in one.starts], [0] * len(uses), None)


class UsePlan:
    """The next uses of entries, from the sequence in which they will be read."""

    def __init__(self, uses: Sequence[str]) -> None:
        self._positions: dict[str, list[int]] = {}
        for position, name in enumerate(uses):
            self._positions.setdefault(name, []).append(position)
        self._now = 0

    def advance(self, position: int) -> None:
        """Everything before `position` has been used."""
        self._now = position

    def next_use(self, name: str) -> float:
        """Steps from now to the next use of an entry, ``math.inf`` if there is none."""
        positions = self._positions.get(name, ())
        at = bisect_left(positions, self._now)
        return positions[at] - self._now if at < len(positions) else math.inf


def simulate(plan: Plan, capacity: int, next_uses: Callable[[int], NextUse]) -> int:
    """Hits of the cache's own eviction, entries of equal size."""
    held: dict[str, CacheEntry] = {}
    hits = 0
    for now, name in enumerate(plan.uses):
        next_use = next_uses(now)
        if name in held:
            hits += 1
        elif len(held) == capacity:
            del held[eviction_order(held.values(), next_use)[0].name]
        held[name] = CacheEntry(name, 1, now)
    return hits


def blind(now: int) -> NextUse:
    return lambda name: math.inf


def knowing(plan: Plan, epochs: int) -> Callable[[int], NextUse]:
    """NextUseIndex of the rest of this epoch and `epochs - 1` more."""
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


def reader(plan: Plan) -> Callable[[int], NextUse] | None:
    """NextUseIndex as a running ``Load`` has it."""
    if plan.order is None:
        return None
    order, world_size, ranks = plan.order
    parts = [PartIndex(Part(f"part-{i}.tar", 100), (Block(0, 100, 0, SAMPLES),)) for i in range(BLOCKS)]
    manifest = Manifest.of(parts)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(len(ranks))}
    next_uses = NextUseIndex(order, manifest, ranks[0], world_size, str)
    deals = [
        RankSteps(
            e, 0, 0, order.length(manifest, world_size, (), ranks[0], 0, e), lambda first, last: np.empty(0)
        )
        for e in range(EPOCHS)
    ]
    ends = [*plan.starts[1:], len(plan.uses)]

    def at(now: int) -> NextUse:
        next_uses.follow(deals[next(i for i, end in enumerate(ends) if now < end)], plan.steps[now])
        return next_uses.next_use

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
        "runs, 8 of 16 ranks": recorded(BlockOrder(shuffle=False), 16, range(8)),
        "in turn, 8 of 16 ranks": recorded(StridedOrder(shuffle=False), 16, range(8)),
        "single samples, strided": recorded(StridedOrder(shuffle=True), 16, range(8)),
        "single samples, runs": recorded(BlockOrder(shuffle=True), 16, range(8)),
        "scan in one sequence": scan(),
        "two jobs, 8 ranks each": two_jobs(),
    }
    configuration = {"blocks": BLOCKS, "epochs": EPOCHS, "capacities": CAPACITIES, "plans": list(plans)}
    harness.header(CLAIM, configuration)
    rows, results = [], {}
    for name, plan in plans.items():
        for share in CAPACITIES:
            capacity = int(BLOCKS * share)
            next_uses = reader(plan)
            hits = {
                "lru": simulate(plan, capacity, blind),
                "reader": simulate(plan, capacity, next_uses) if next_uses else None,
                "plan, this epoch and the next": simulate(plan, capacity, knowing(plan, 2)),
                "plan, all epochs": simulate(plan, capacity, knowing(plan, EPOCHS)),
                "optimum": optimum(plan.uses, capacity),
            }
            results[f"{name}, {share:.0%}"] = {"uses": len(plan.uses), **hits}
            rows.append(
                [
                    name,
                    f"{share:.0%}",
                    *("-" if n is None else f"{n / len(plan.uses):.1%}" for n in hits.values()),
                ]
            )
    print(harness.table(["plan", "cache/data", *hits], rows))
    plan, capacity = plans["lanes, 8 of 16 ranks"], BLOCKS // 4
    on_disk = real_cache(plan, capacity)
    expected = results["lanes, 8 of 16 ranks, 25%"]["plan, all epochs"]
    print(f"check: NodeCache on disk hit {on_disk} times, simulated {expected}")
    # What was downloaded a moment ago is still being synced, and stays until that is done.
    if abs(on_disk - expected) > 0.01 * expected:
        raise SystemExit("the cache on disk does not do what its simulation does")
    if not options.no_record:
        print("recorded in", harness.record("cache_eviction", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main(harness.arguments(__doc__, rounds=1).parse_args())
