"""One stream for all ranks: rank r of W takes positions r, r+W, r+2W ... of it.

After G positions are consumed, rank r's step j is position G + j*W + r. So any
world size sees the same stream, and a resume at another one goes on where it was.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from pipegraph.order.layout import Int64Array

Tail: TypeAlias = Literal["pad", "drop", "uneven"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "uneven")


def consumed(history: tuple[tuple[int, int], ...]) -> int:
    """Positions that the ranks consumed together."""
    return sum(ranks * samples for ranks, samples in history)


def stream_length(total: int, world_size: int, rank: int, done: int, tail: Tail) -> int:
    """Steps left to a rank of a stream of ``total`` samples after ``done`` positions."""
    left = max(0, total - done)
    if tail == "pad":
        return -(-left // world_size)
    if tail == "drop":
        return left // world_size
    return max(0, -(-(left - rank) // world_size))


def stream_positions(world_size: int, rank: int, done: int, start: int, stop: int) -> Int64Array:
    """Positions of a rank's steps start..stop, int64 (stop - start,)."""
    return np.arange(start, stop, dtype=np.int64) * world_size + (done + rank)
