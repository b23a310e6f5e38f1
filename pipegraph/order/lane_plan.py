"""The cost of a number of lanes, before anything is read: lanes per rank, bytes, re-reading."""

from __future__ import annotations

import dataclasses
import math

from pipegraph.errors import GraphError, MemoryLimitError
from pipegraph.order.lane_order import LaneOrder
from pipegraph.order.layout import LayoutLike, block_samples

# From 16 lanes per rank on batches come close to a global shuffle, and more than 32 gain
# little (tests/order/test_quality.py); 15 are the default's share for 16 ranks.
GOOD_LANES_PER_RANK = range(15, 33)

# One block in use and one on its way, for each lane and block of its window.
BLOCKS_PER_LANE = 2


@dataclasses.dataclass(frozen=True)
class LanePlan:
    """The figures of a ``LaneOrder`` on a layout and a number of ranks.

    Attributes:
        lanes_per_rank: lanes that a rank reads at once, L / gcd(L, W).
        ranks_per_lane: ranks that read the same lane's blocks, W / gcd(L, W).
        blocks_held: blocks that a rank holds at once, half of them on their way.
        bytes_held: their bytes, if all are as large as the largest block.
        read_amplification: how often each block is fetched in an epoch at most, on average, by all ranks together; a
            cache shared by ranks divides it.
        proposed_lanes: a better ``lanes=``, or None where this one is good.
    """

    lanes: int
    world_size: int
    lanes_per_rank: int
    ranks_per_lane: int
    blocks_held: int
    bytes_held: int
    read_amplification: float
    proposed_lanes: int | None

    def __str__(self) -> str:
        text = (
            f"{self.lanes} lanes for {self.world_size} ranks: {self.lanes_per_rank} per rank, "
            f"{self.blocks_held} blocks ({self.bytes_held / 1e9:.1f} GB) held, "
            f"{self.read_amplification:.2f} reads of each block"
        )
        return text if self.proposed_lanes is None else f"{text}; better: lanes={self.proposed_lanes}"


def lane_plan(order: LaneOrder, layout: LayoutLike, world_size: int, block_bytes: int) -> LanePlan:
    """The figures of an order; ``block_bytes`` are the largest block's."""
    blocks = len(block_samples(layout))
    lanes = order.lane_count(layout) if order.shuffle else 1
    shared = math.gcd(lanes, world_size)
    held = lanes // shared * order.window * BLOCKS_PER_LANE
    # Neighbouring lanes share the window in which one ends and the other begins, and by its rotation each lane begins
    # inside a window to which it comes back at its end.
    again = 2 * lanes * order.window / blocks if order.shuffle and blocks > 1 else 0.0
    return LanePlan(
        lanes=lanes,
        world_size=world_size,
        lanes_per_rank=lanes // shared,
        ranks_per_lane=world_size // shared,
        blocks_held=held,
        bytes_held=held * block_bytes,
        read_amplification=world_size // shared * (1 + again),
        proposed_lanes=proposed_lanes(lanes, blocks, world_size) if order.shuffle else None,
    )


def proposed_lanes(lanes: int, blocks: int, world_size: int) -> int | None:
    """A better number of lanes, or None where this one is good or none is better.

    Good is: every lane read by one rank, and 15 to 32 lanes per rank. Proposed is the multiple of the ranks, 16 to 32
    lanes each, with the most divisors, so that most other world sizes divide it too, as far as there are blocks.
    """
    if lanes % world_size == 0 and lanes // world_size in GOOD_LANES_PER_RANK:
        return None
    limit = min(32, blocks // world_size)
    if limit < 1:
        return None
    multiples = range(min(16, limit), limit + 1)
    best = max((m * world_size for m in multiples), key=lambda n: (_divisors(n), -n))
    return best if best != lanes else None


def largest_lanes(blocks: int, world_size: int, block_bytes: int, memory_limit: int, window: int = 1) -> int:
    """The largest ``lanes=`` whose blocks fit a rank's memory; 0 if not even one lane does."""
    per_rank = memory_limit // (BLOCKS_PER_LANE * window * block_bytes)
    candidates = range(min(per_rank * world_size, blocks), 0, -1)
    return next((lanes for lanes in candidates if lanes // math.gcd(lanes, world_size) <= per_rank), 0)


def require_memory(
    order: LaneOrder, layout: LayoutLike, world_size: int, block_bytes: int, memory_limit: int
) -> None:
    """Raise unless the blocks that a rank holds at once fit its memory.

    Raises:
        MemoryLimitError: naming the largest ``lanes=`` that fits.
        GraphError: ``block_bytes`` is not positive.
    """
    if block_bytes < 1:
        raise GraphError(f"LaneOrder: block_bytes must be >= 1, got {block_bytes!r}")
    plan = lane_plan(order, layout, world_size, block_bytes)
    if plan.bytes_held <= memory_limit:
        return
    fits = largest_lanes(len(block_samples(layout)), world_size, block_bytes, memory_limit, order.window)
    remedy = (
        f"Use LaneOrder(lanes={fits}), or a larger memory_limit."
        if fits
        else f"Make blocks smaller than {memory_limit // (BLOCKS_PER_LANE * order.window)} bytes, "
        "or memory_limit larger."
    )
    raise MemoryLimitError(
        f"{order!r}: the blocks that a rank of {world_size} holds at once must fit memory_limit="
        f"{memory_limit}, but {plan.blocks_held} blocks of up to {block_bytes} bytes take {plan.bytes_held}. "
        f"{remedy}"
    )


def _divisors(number: int) -> int:
    return sum(2 - (i * i == number) for i in range(1, math.isqrt(number) + 1) if number % i == 0)
