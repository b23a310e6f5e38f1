"""One stream for all ranks: rank r of W takes positions r, r+W, r+2W ... of it.

After some were consumed, rank r takes numbers r, r+W, r+2W ... of those that are left. So any
world size sees the same stream, and a resume at another one continues where it was.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from pipegraph.order.layout import Int64Array
from pipegraph.order.left import Deal, left_of

Tail: TypeAlias = Literal["pad", "drop", "uneven"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "uneven")


def stream_length(total: int, deal: Deal, rank: int, tail: Tail) -> int:
    """Steps left to a rank of a stream of ``total`` samples."""
    left = left_of(deal.history).count(total)
    if tail == "pad":
        return -(-left // deal.world_size)
    if tail == "drop":
        return left // deal.world_size
    return max(0, -(-(left - rank) // deal.world_size))


def stream_positions(deal: Deal, rank: int, start: int, stop: int) -> Int64Array:
    """Positions of a rank's steps start..stop, int64 (stop - start,)."""
    return left_of(deal.history).at(np.arange(start, stop, dtype=np.int64) * deal.world_size + rank)
