"""The figures of a number of lanes."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("world_size", [1, 5, 7, 8, 16, 60, 64, 100, 512, 4_096])
def test_what_is_proposed_is_a_multiple_of_the_ranks_with_16_to_32_each_if_there_are_blocks(world_size):
    lanes = proposed_lanes(1, 10**6, world_size)
    assert lanes is not None
    assert lanes % world_size == 0
    assert 16 <= lanes // world_size <= 32
    assert proposed_lanes(lanes, 10**6, world_size) is None


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
