"""The figures of a number of lanes."""

from __future__ import annotations

import math

import pytest

from pipegraph.order import LaneOrder
from pipegraph.order.lane_plan import lane_plan, largest_lanes

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


@pytest.mark.parametrize("world_size", [1, 6, 7, 16])
@pytest.mark.parametrize("memory", [1, 7, 40, 1_000])
def test_the_largest_lanes_fit_and_no_larger_do(world_size, memory):
    blocks = 300
    lanes = largest_lanes(blocks, world_size, 1, memory)
    fitting = [n for n in range(1, blocks + 1) if 2 * n // math.gcd(n, world_size) <= memory]
    assert lanes == max(fitting, default=0)
