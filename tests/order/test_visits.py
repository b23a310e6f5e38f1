"""When a node's ranks read which blocks: what is foreseen against what the orders give."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipegraph.order import BlockOrder, LaneOrder, Order, PartOrder, StridedOrder
from pipegraph.order.layout import Int64Array
from pipegraph.order.left import Deal
from pipegraph.order.visits import NEVER
from pipegraph.reader.next_use import drawn_visits


class Layout(NamedTuple):
    part_samples: Int64Array
    block_samples: Int64Array
    digest: str


def layout_of(parts: list[list[int]]) -> Layout:
    blocks = np.array([samples for part in parts for samples in part], dtype=np.int64)
    return Layout(np.array([sum(part) for part in parts], dtype=np.int64), blocks, repr(parts))


FORESEEN = (
    LaneOrder(lanes=4),
    LaneOrder(lanes=3, window=2),
    LaneOrder(shuffle=False),
    PartOrder(),
    PartOrder(shuffle=False),
    StridedOrder(shuffle=False),
    BlockOrder(shuffle=False),
    BlockOrder(shuffle=False, allow_duplicates=False),
)
DRAWN = (StridedOrder(shuffle=True), BlockOrder(shuffle=True), BlockOrder(shuffle=True, compat=True))
layouts = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=2, max_size=5).map(
    layout_of
)


def read(order: Order, layout: Layout, deal: Deal, rank: int) -> list[tuple[int, int]]:
    """(step, block) of a rank, padding left out."""
    args = (layout, deal.seed, deal.epoch, rank, deal.world_size, 0, None, deal.history)
    ends, total = np.cumsum(layout.block_samples), int(layout.block_samples.sum())
    blocks = np.searchsorted(ends, order.indices(*args), side="right")
    real = order.positions(*args) < total
    return [(step, int(block)) for step, (block, kept) in enumerate(zip(blocks, real, strict=True)) if kept]


@settings(max_examples=150)
@given(st.sampled_from(FORESEEN), layouts, st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.data())
def test_every_read_lies_in_a_visit_and_visits_begin_and_end_near_reads(
    order: Order, layout: Layout, world_size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    history: tuple[tuple[int, int], ...] = ()
    if data.draw(st.booleans()):
        before = data.draw(st.integers(1, 3))
        limit = order.length(layout, before, (), 0, seed, epoch)
        history = ((before, data.draw(st.integers(0, limit))),)
    deal = Deal(seed, epoch, world_size, history)
    ranks = sorted(data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
    visits = order.visits(layout, deal, ranks)
    assert visits is not None
    for rank in ranks:
        for step, block in read(order, layout, deal, rank):
            assert visits.next_use(block, step) == 0, (rank, step, block)


@pytest.mark.parametrize("order", FORESEEN, ids=repr)
def test_visits_are_tight(order: Order) -> None:
    layout = layout_of([[40, 44, 48], [52, 40], [44, 60, 40, 40]])
    deal = Deal(3, 1, 4, ())
    visits = order.visits(layout, deal, range(4))
    reads = [found for rank in range(4) for found in read(order, layout, deal, rank)]
    for block in range(9):
        mine = {step for step, number in reads if number == block}
        inside: set[int] = set()
        for visit in range(int(visits.starts[block]), int(visits.starts[block + 1])):
            inside |= set(range(int(visits.first[visit]), int(visits.last[visit]) + 1))
        # Samples are permuted within a window or a part: there a visit is as long as that.
        assert mine <= inside
        assert len(inside) <= 5 * len(mine) + 8


@pytest.mark.parametrize("order", [*FORESEEN, *DRAWN], ids=repr)
def test_drawn_visits_are_the_reads_themselves(order: Order) -> None:
    layout, deal = layout_of([[9, 5], [12, 3, 7], [8]]), Deal(1, 0, 3, ())
    visits = drawn_visits(order, layout, deal, [0, 2], 2, 8)
    reads = {found for rank in (0, 2) for found in read(order, layout, deal, rank) if 2 <= found[0] < 8}
    for block in range(6):
        steps = sorted(step for step, number in reads if number == block)
        assert visits.next_use(block, 0) == (steps[0] if steps else NEVER)
    assert visits.next_use(0, 8) == NEVER


def test_the_soonest_come_first_and_each_once() -> None:
    layout = layout_of([[10], [10], [10], [10]])
    visits = StridedOrder(shuffle=False).visits(layout, Deal(0, 0, 2, ()), [0])
    assert visits.soonest(0, 10).tolist() == [0, 1, 2, 3]
    assert visits.soonest(7, 2).tolist() == [1, 2]
    assert visits.soonest(50, 2).tolist() == []
