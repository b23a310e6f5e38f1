"""The memory that a number of lanes takes."""

from __future__ import annotations

import math

import pytest

from pipegraph.errors import MemoryLimitError
from pipegraph.order import LaneOrder


def test_the_cost_of_lanes_is_said_for_a_number_of_ranks():
    blocks = [1_000] * 4_800
    assert (
        LaneOrder().cost(blocks, 16, 128_000_000)
        == "240 lanes for 16 ranks: 15 per rank, 30 blocks (3.8 GB) held"
    )
    of_seven = LaneOrder().cost(blocks, 7, 128_000_000)
    assert "240 per rank, 480 blocks (61.4 GB) held, each read by 7 ranks; better: lanes=168" in of_seven


@pytest.mark.parametrize("world_size", [1, 6, 7, 16])
@pytest.mark.parametrize("memory", [1, 7, 40])
def test_the_error_names_the_largest_lanes_that_fit(world_size, memory):
    blocks = [10] * 300
    fitting = [n for n in range(1, 301) if 2 * n // math.gcd(n, world_size) <= memory]
    said = f"lanes={max(fitting)}" if fitting else "Make blocks smaller"
    with pytest.raises(MemoryLimitError, match=said):
        LaneOrder(lanes=299).require_memory(blocks, world_size, 1, memory)
