"""What a node cache knows of the future: hits against the least recently used and the offline optimum, for every order."""

import dataclasses
import heapq
import math
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph.order import BlockOrder, LaneOrder, Order, PartOrder, StridedOrder
from pipegraph.reader import next_use as next_uses
from pipegraph.reader.next_use import NextUseIndex
from pipegraph.reader.schedule import RankSteps
from pipegraph.storage import Manifest, Part
from pipegraph.storage.formats import Block
from pipegraph.storage.manifest import PartIndex
from pipegraph.storage.space import CacheEntry, NextUse, eviction_order

PARTS, BLOCKS, SAMPLES, WORLD, EPOCHS = 30, 4, 12, 4, 4
RANKS = (2, 3)
"""Of this node: half of all."""

ORDERS = [
    LaneOrder(lanes=12),
    LaneOrder(lanes=12, window=2),
    LaneOrder(shuffle=False),
    PartOrder(),
    PartOrder(shuffle=False),
    BlockOrder(shuffle=False),
    StridedOrder(shuffle=False),
]


@dataclasses.dataclass(frozen=True)
class OwnOrder(Order):
    """One of a user's own: from the last sample to the first, begun elsewhere in each epoch."""

    def config(self) -> dict[str, Any]:
        return {"order": "OwnOrder"}

    def draw(self, layout: Any, positions: Any, seed: int, epoch: int) -> Any:
        return (-1 - 97 * epoch - positions) % pg.order.total_samples(layout)


SHUFFLED = [StridedOrder(shuffle=True), BlockOrder(shuffle=True), OwnOrder()]

Use = tuple[int, int, int]
"""Epoch, step, block."""


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    blocks = tuple(Block(i * 100, 100, i * SAMPLES, SAMPLES) for i in range(BLOCKS))
    return Manifest.of([PartIndex(Part(f"part-{i:02}.tar", 100 * BLOCKS), blocks) for i in range(PARTS)])


@pytest.fixture(autouse=True)
def half_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(RANKS)))


def recorded(order: Order, manifest: Manifest) -> list[Use]:
    """The blocks that the node's ranks open, step by step; one that a rank reads on from is open already."""
    uses: list[Use] = []
    for epoch in range(EPOCHS):
        per_rank = [order.indices(manifest, 5, epoch, rank, WORLD) // SAMPLES for rank in RANKS]
        last: dict[int, dict[int, int]] = {rank: {} for rank in RANKS}
        for step in range(max(len(blocks) for blocks in per_rank)):
            for rank, blocks in zip(RANKS, per_rank, strict=True):
                if step < len(blocks):
                    block = int(blocks[step])
                    # What was read within the last few steps is still open.
                    if step - last[rank].get(block, -100) > 6:
                        uses.append((epoch, step, block))
                    last[rank][block] = step
    return uses


def hits(uses: list[Use], capacity: int, foresee: Any) -> int:
    """Of a cache that evicts as ours does; ``foresee(epoch, step)`` gives the next uses."""
    held: dict[str, CacheEntry] = {}
    count = 0
    for now, (epoch, step, block) in enumerate(uses):
        next_use: NextUse = foresee(epoch, step)
        name = str(block)
        if name in held:
            count += 1
        elif len(held) == capacity:
            del held[eviction_order(held.values(), next_use)[0].name]
        held[name] = CacheEntry(name, 1, now)
    return count


def optimum(uses: list[Use], capacity: int) -> int:
    """Belady's: evict what is used farthest ahead."""
    following = [len(uses)] * len(uses)
    last: dict[int, int] = {}
    for at in reversed(range(len(uses))):
        following[at] = last.get(uses[at][2], len(uses))
        last[uses[at][2]] = at
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    count = 0
    for at, (_, _, block) in enumerate(uses):
        if block in held:
            count += 1
        elif len(held) == capacity:
            while True:
                steps, out = heapq.heappop(farthest)
                if held.get(out) == -steps:
                    del held[out]
                    break
        held[block] = following[at]
        heapq.heappush(farthest, (-following[at], block))
    return count


def planned(order: Order, manifest: Manifest) -> Any:
    """``foresee`` as a running reader does it."""
    next_uses_ = NextUseIndex(order, manifest, RANKS[0], WORLD, str)
    deals: dict[int, RankSteps] = {}

    def foresee(epoch: int, step: int) -> NextUse:
        if epoch not in deals:
            stop = order.length(manifest, WORLD, (), RANKS[0], 5, epoch)
            deals[epoch] = RankSteps(epoch, 5, 0, stop, lambda first, last: np.empty(0, np.int64))
        next_uses_.follow(deals[epoch], step)
        return next_uses_.next_use

    return foresee


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("order", [*ORDERS, *SHUFFLED], ids=repr)
def test_every_orders_plan_hits_nearly_as_often_as_any_cache_can(
    order: Order, share: float, manifest: Manifest
) -> None:
    uses = recorded(order, manifest)
    capacity = int(share * len({block for _, _, block in uses}))
    ours = hits(uses, capacity, planned(order, manifest))
    lru = hits(uses, capacity, lambda epoch, step: lambda name: math.inf)
    best = optimum(uses, capacity)
    print(
        f"{order!r} {share:.0%}: lru {lru / len(uses):.1%}, plan {ours / len(uses):.1%}, optimum {best / len(uses):.1%}"
    )
    assert lru <= ours <= best
    assert ours >= 0.9 * best
    if best > 1.2 * lru:
        assert ours - lru >= 0.8 * (best - lru)


def test_of_more_blocks_than_are_named_the_soonest_are_known(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_uses, "MAX_NAMES", 64)
    order = pg.order.LaneOrder(lanes=12)
    named: list[int] = []

    def name(number: int) -> str:
        named.append(number)
        return str(number)

    looks = NextUseIndex(order, manifest, RANKS[0], WORLD, name)
    stop = order.length(manifest, WORLD)
    deal = RankSteps(0, 5, 0, stop, lambda first, last: np.empty(0, np.int64))
    uses = recorded(order, manifest)
    for epoch, step, block in uses:
        if not epoch:
            looks.follow(deal, step)
            assert looks.next_use(str(block)) == 0
    assert len(named) <= 2 * manifest.blocks  # named anew when half of them have begun
