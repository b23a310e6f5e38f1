"""The figures of a number of lanes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipegraph.errors import GraphError, MemoryLimitError
from pipegraph.order import LaneOrder
from pipegraph.order.lane_plan import lane_plan, largest_lanes, proposed_lanes, require_memory

BLOCKS = [1_000] * 4_800


def test_a_divisor_of_the_lanes_reads_each_block_about_once():
    plan = lane_plan(LaneOrder(), BLOCKS, 16, 128_000_000)
    assert (plan.lanes, plan.lanes_per_rank, plan.ranks_per_lane, plan.blocks_held) == (240, 15, 1, 30)
    assert plan.bytes_held == 30 * 128_000_000
    # A lane is 20 blocks, of which it may share the first with another lane, and reads it again at its end.
    assert plan.read_amplification == pytest.approx(1.10, abs=0.001)
    assert plan.proposed_lanes is None
    assert (
        str(plan) == "240 lanes for 16 ranks: 15 per rank, 30 blocks (3.8 GB) held, 1.10 reads of each block"
    )


def test_ranks_that_do_not_divide_the_lanes_read_blocks_several_times_and_are_told_so():
    plan = lane_plan(LaneOrder(), BLOCKS, 7, 10**8)
    assert (plan.lanes_per_rank, plan.ranks_per_lane) == (240, 7)
    assert plan.read_amplification == pytest.approx(7 * 1.10, abs=0.01)
    assert plan.proposed_lanes == 168
    assert str(plan).endswith("; better: lanes=168")


def test_the_reads_are_hardly_more_than_what_ranks_really_touch():
    rng = np.random.default_rng(0)
    for blocks, lanes in ((480, 6), (480, 60), (200, 100)):
        layout = rng.integers(50, 150, blocks).tolist()
        order = LaneOrder(lanes=lanes)
        plan = lane_plan(order, layout, 1, 1)
        place = np.searchsorted(np.cumsum(layout), order.indices(layout, 5, 0), side="right")
        # One reader follows each lane's samples and fetches a block when it changes.
        fetched = sum(1 + np.count_nonzero(np.diff(place[lane::lanes])) for lane in range(lanes))
        assert fetched / blocks <= plan.read_amplification <= 1.05 * fetched / blocks


@pytest.mark.parametrize("world_size", [1, 5, 7, 8, 16, 60, 64, 100, 512, 4_096])
def test_what_is_proposed_is_a_multiple_of_the_ranks_with_16_to_32_each_if_there_are_blocks(world_size):
    lanes = proposed_lanes(1, 10**6, world_size)
    assert lanes is not None
    assert lanes % world_size == 0
    assert 16 <= lanes // world_size <= 32
    assert proposed_lanes(lanes, 10**6, world_size) is None


def test_few_blocks_give_what_they_can():
    assert proposed_lanes(50, 50, 16) == 48
    assert proposed_lanes(10, 10, 16) is None
    assert proposed_lanes(240, 240, 7) == 168


@pytest.mark.parametrize("world_size", [1, 6, 7, 16])
@pytest.mark.parametrize("memory", [1, 7, 40, 1_000])
def test_the_largest_lanes_fit_and_no_larger_do(world_size, memory):
    blocks = 300
    lanes = largest_lanes(blocks, world_size, 1, memory)
    fitting = [n for n in range(1, blocks + 1) if 2 * n // math.gcd(n, world_size) <= memory]
    assert lanes == max(fitting, default=0)


def test_too_little_memory_is_an_error_that_names_the_largest_lanes_that_fit():
    with pytest.raises(
        MemoryLimitError, match=r"memory_limit=1000, but 480 blocks .* Use LaneOrder\(lanes=35\)"
    ):
        require_memory(LaneOrder(), BLOCKS, 7, 100, 1_000)
    with pytest.raises(MemoryLimitError, match="Make blocks smaller than 25 bytes, or memory_limit larger"):
        require_memory(LaneOrder(window=2), BLOCKS, 7, 100, 100)
    require_memory(LaneOrder(lanes=35), BLOCKS, 7, 100, 1_000)
    with pytest.raises(GraphError, match="block_bytes must be >= 1, got 0"):
        require_memory(LaneOrder(), BLOCKS, 7, 0, 100)


def test_an_order_in_manifest_order_reads_one_lane_that_all_ranks_share():
    plan = lane_plan(LaneOrder(shuffle=False), BLOCKS, 4, 10)
    assert (plan.lanes, plan.lanes_per_rank, plan.ranks_per_lane, plan.read_amplification) == (1, 1, 4, 4.0)
    assert plan.proposed_lanes is None
    assert lane_plan(LaneOrder(), 0, 4, 10).read_amplification == 4.0
