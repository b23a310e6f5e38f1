"""One stream for all ranks: rank r of W takes positions r, r+W, r+2W ... of it.

After some were consumed, rank r takes numbers r, r+W, r+2W ... of those that are left. So any
world size sees the same stream, and a resume at another one continues where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from pipegraph.order.layout import Int64Array, LayoutLike, block_samples
from pipegraph.order.left import Deal, left_of

if TYPE_CHECKING:
    from pipegraph.order.visits import Visits

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


def stream_gone(deal: Deal) -> int:
    """How far the stream's numbers are behind its positions, where all are left."""
    left = left_of(deal.history)
    return left.start - len(left.front)


def stream_visits(layout: LayoutLike, deal: Deal) -> Visits:
    """The visits of an order that reads the blocks one after the other, all ranks together."""
    from pipegraph.order.visits import Visits

    samples = block_samples(layout)
    ends = np.cumsum(samples)
    gone = stream_gone(deal)  # what is left before that is read at once
    first, last = ends - samples - gone, ends - 1 - gone
    return Visits.of(
        len(samples), (np.arange(len(samples)), first // deal.world_size, last // deal.world_size)
    )
