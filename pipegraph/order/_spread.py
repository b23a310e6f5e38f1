"""Permutes blocks so that the lanes of ``LaneOrder`` always read from all over the data."""

from __future__ import annotations

import itertools

import numpy as np

from pipegraph.order.layout import Int64Array
from pipegraph.order.permutation import key64, shuffled

# Blocks that a lane reads in one stratum. Lanes change strata at slightly different times, and in between cover the
# data less evenly: with 16 blocks drift stays below 8 in tests/order/test_drift.py, also where blocks differ in size.
BLOCKS_PER_TURN = 16

# Turns per lane at most: each is a slice to copy, and more of them mix no better.
TURNS = 64


def spread(samples: Int64Array, lanes: int, seed: int, epoch: int) -> Int64Array:
    """The blocks in the order in which they are laid end to end, to be cut into ``lanes`` equal lanes.

    The data is taken as ``lanes`` strata: runs of neighbouring blocks with about as many samples each. Every
    stratum's blocks are permuted and cut into as many turns. In turn t lane l reads in stratum (l + t*step) mod lanes:
    at any time each stratum is read by one lane, and in each turn a lane reads elsewhere. Then the lanes
    are permuted. So batches of data sorted by class hold all classes throughout, as in stratified sampling, while no
    more blocks are held than if each were drawn from all of the data.

    Args:
        samples: of each block, int64 (blocks,).

    Returns:
        A permutation of the blocks, int64 (blocks,).
    """
    blocks = np.arange(len(samples), dtype=np.int64)
    ends = np.cumsum(samples)
    strata = np.searchsorted(ends, _cuts(0, int(ends[-1]) if len(ends) else 0, lanes), side="right")
    strata[0], strata[-1] = 0, len(blocks)
    draws = np.random.RandomState(np.random.Philox(key=key64("blocks", seed, epoch)))  # as ``shuffled``
    for first, last in itertools.pairwise(strata.tolist()):
        draws.shuffle(blocks[first:last])
    if lanes == 1:
        return blocks
    # Every stratum's turns have as many samples, less than a block more or less.
    ends = np.concatenate(([0], np.cumsum(samples[blocks])))
    turns = max(1, min(len(blocks) // lanes // BLOCKS_PER_TURN, TURNS))
    bounds = ends[strata]
    cuts = np.stack([_cuts(first, last, turns) for first, last in itertools.pairwise(bounds.tolist())])
    cuts = np.searchsorted(ends, cuts).clip(
        strata[:-1, None], strata[1:, None]
    )  # among blocks without samples
    cuts[:, 0], cuts[:, -1] = strata[:-1], strata[1:]
    turn = np.arange(turns)
    stratum = (np.arange(lanes)[:, None] + turn * -(-lanes // turns)) % lanes  # of each lane in each turn
    firsts, lasts = cuts[stratum, turn], cuts[stratum, turn + 1]
    excess = (ends[lasts] - ends[firsts]).sum(axis=1) * lanes - ends[-1]
    drawn = _balanced(excess, key64("lanes", seed, epoch))
    slices = zip(firsts[drawn].ravel().tolist(), lasts[drawn].ravel().tolist(), strict=True)
    return np.concatenate([blocks[first:last] for first, last in slices])


def _cuts(first: int, last: int, pieces: int) -> Int64Array:
    """The places that cut ``first``..``last`` into equal pieces, both ends included."""
    share, rest = divmod(last - first, pieces)
    number = np.arange(pieces + 1, dtype=np.int64)
    return first + number * share + np.minimum(number, rest)


def _balanced(excess: Int64Array, key: int) -> list[int]:
    """The lanes in a keyed order in which sums of ``excess`` from the first on stay near 0.

    A lane's blocks never add up to exactly its share, and the stream is cut into equal lanes: the differences
    must not accumulate from lane to lane.
    """
    drawn = shuffled(len(excess), key)
    short, long = drawn[excess[drawn] < 0].tolist(), drawn[excess[drawn] >= 0].tolist()
    excesses, order, total = excess.tolist(), [], 0
    while short or long:
        lane = (short if (total > 0 and short) or not long else long).pop()
        total += excesses[lane]
        order.append(lane)
    return order
