"""What will be read when: pure functions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.operators.lookahead import NEVER, Pace, Uses, first_positions
from pipegraph.operators.shelves import node_lanes
from pipegraph.order import LaneOrder
from pipegraph.order.lanes import LanedEpoch


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 100))
def test_uses_name_each_block_once_with_its_first_and_last_step(blocks: list[int], start: int) -> None:
    uses = Uses.of(np.array(blocks), start)
    assert sorted(uses.numbers.tolist()) == sorted(set(blocks))
    assert uses.first.tolist() == sorted(uses.first.tolist())
    for number, first, last in zip(uses.numbers, uses.first, uses.last, strict=True):
        steps = [start + i for i, block in enumerate(blocks) if block == number]
        assert (first, last) == (steps[0], steps[-1])


def test_the_pace_is_the_mean_of_the_strides_without_the_longest_of_twenty() -> None:
    pace = Pace()
    assert pace.mean is None
    for _ in range(39):
        pace.add(1.0)
    pace.add(600.0)
    assert pace.mean == 1.0
    for _ in range(64):
        pace.add(3.0)
    assert pace.mean == 3.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(1, 8),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_the_first_position_of_a_block_is_where_an_order_first_reads_it(
    samples: list[int], lanes: int, seed: int, epoch: int
) -> None:
    order = LaneOrder(lanes=lanes)
    total = sum(samples)
    blocks = np.repeat(np.arange(len(samples)), samples)[order.indices(samples, seed, epoch)[:total]]
    lanes = order.lane_count(samples)
    laned = LanedEpoch.of(np.array(samples, dtype=np.int64), lanes, 1, seed, epoch)
    found = first_positions(laned)
    for block in range(len(samples)):
        places = np.flatnonzero(blocks == block)
        # The window permutation moves samples inside a block's piece of a lane, never out of it. A block in
        # more than two lanes is only looked at in its first and last.
        spans = len(set((places % lanes).tolist()))
        assert found[block] == places[0] if spans <= 2 else found[block] >= places[0]


def test_lanes_of_other_nodes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    laned = LanedEpoch.of(np.full(16, 10, dtype=np.int64), 8, 1, 0, 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    lanes = node_lanes(8, 3, 4)
    assert lanes.tolist() == [2, 3, 6, 7]
    here, anywhere = first_positions(laned, lanes), first_positions(laned)
    assert 0 < (here < NEVER).sum() < 16
    assert np.all(here >= anywhere)
    assert np.all(np.isin(here[here < NEVER] % 8, lanes))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert node_lanes(8, 3, 4).tolist() == list(range(8))
