"""``LaneOrder``: the default order of shards. Memory for blocks, never for samples."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import final

import numpy as np

from pipegraph.errors import MemoryLimitError
from pipegraph.integers import integer
from pipegraph.order.base import TAILS, JsonDict, Order, Tail, check_choice, check_flags
from pipegraph.order.layout import (
    BlockPlaces,
    Int64Array,
    LayoutLike,
    block_samples,
    layout_digest,
    total_samples,
)
from pipegraph.order.permutation import BoundedMemo, derived_keys, key64, permute, shuffled

DEFAULT_LANES = 240

# One block in use and one on its way, for each lane and block of its window.
BLOCKS_PER_LANE = 2

# From 16 lanes per rank on batches come close to a global shuffle, and more than 32 gain
# little (tests/order/test_quality.py); 15 are the default's share for 16 ranks.
GOOD_LANES_PER_RANK = range(15, 33)


@final
@dataclasses.dataclass(frozen=True)
class LaneOrder(Order):
    """Permuted blocks, read in parallel lanes: close to a global shuffle, and exactly elastic.

    The blocks of a manifest (a layout without blocks has its parts as blocks) are
    permuted by a key of (seed, epoch) and laid end to end. That stream is cut into
    L = min(lanes, blocks) equal lanes. The permutation is stratified: at any time the
    lanes read from L places spread evenly over the data (``spread``), so that batches
    of data sorted by class do not drift. Position k is lane k mod L at offset k div L,
    shifted by the lane's rotation, which spreads the lanes' block switches in time;
    inside a window of ``window`` blocks of the lane the samples are permuted. Rank r
    of W takes the positions r, r+W, r+2W ... So every world size sees one global
    order, and a resume at another world size is exact.

    Args:
        lanes: number of lanes into which the stream is cut, >= 1. More lanes per rank
            (lanes / gcd(lanes, W)) mix more parts into a batch, and need more blocks
            at the same time: the printed plan says how many.
        window: blocks whose samples are permuted together, >= 1.
        shuffle: permute; else the samples come in manifest order (no lanes).
        tail: if the last samples are not enough for a step on every rank: pad them from
            the stream's start (``"pad"``), leave them out (``"drop"``), or give some
            ranks a step more (``"uneven"``).

    Raises:
        GraphError: ``lanes`` or ``window`` is below 1, or ``tail`` is none of these.
    """

    lanes: int = DEFAULT_LANES
    window: int = 1
    shuffle: bool = True
    tail: Tail = "pad"

    def __post_init__(self) -> None:
        check_flags(self, "shuffle")
        for name in ("lanes", "window"):
            object.__setattr__(self, name, integer(getattr(self, name), f"LaneOrder: {name}"))
        check_choice("LaneOrder: tail", self.tail, TAILS)

    def config(self) -> JsonDict:
        # A state from before blocks were spread is of another order.
        spread = {"blocks": "spread"} if self.shuffle else {}
        return {"order": "LaneOrder", **dataclasses.asdict(self), **spread}

    def lane_count(self, layout: LayoutLike) -> int:
        """L, the lanes that this layout is cut into: fewer than ``lanes`` where blocks are few."""
        return max(1, min(self.lanes, len(block_samples(layout))))

    def blocks_held(self, layout: LayoutLike, world_size: int) -> int:
        """Blocks that a rank holds at once, half of them on their way."""
        lanes = self.lane_count(layout) if self.shuffle else 1
        return lanes // math.gcd(lanes, world_size) * self.window * BLOCKS_PER_LANE

    def cost(self, layout: LayoutLike, world_size: int, block_bytes: int) -> str:
        """What the lanes cost a number of ranks, in words; ``block_bytes`` are the largest block's."""
        lanes, held = self.lane_count(layout) if self.shuffle else 1, self.blocks_held(layout, world_size)
        shared = math.gcd(lanes, world_size)
        text = (
            f"{lanes} lanes for {world_size} ranks: {lanes // shared} per rank, {held} blocks "
            f"({held * block_bytes / 1e9:.1f} GB) held"
        )
        if not self.shuffle:
            return text
        if shared < world_size:
            text += f", each read by {world_size // shared} ranks"
        # Most other numbers of ranks divide 24 lanes for each, too.
        better = min(24, len(block_samples(layout)) // world_size) * world_size
        good = shared == world_size and lanes // shared in GOOD_LANES_PER_RANK
        return text if good or better in (0, lanes) else f"{text}; better: lanes={better}"

    def require_memory(
        self, layout: LayoutLike, world_size: int, block_bytes: int, memory_limit: int
    ) -> None:
        """Raise unless the blocks that a rank holds at once fit its memory.

        Raises:
            MemoryLimitError: naming the largest ``lanes=`` that fits.
        """
        held = self.blocks_held(layout, world_size)
        if held * block_bytes <= memory_limit:
            return
        per_rank = memory_limit // (BLOCKS_PER_LANE * self.window * block_bytes)
        most = min(per_rank * world_size, len(block_samples(layout)))
        fits = (n for n in range(most, 0, -1) if n // math.gcd(n, world_size) <= per_rank)
        raise MemoryLimitError(
            f"{self!r}: the blocks that a rank of {world_size} holds at once must fit memory_limit={memory_limit}, but "
            f"{held} blocks of up to {block_bytes} bytes take {held * block_bytes}. "
            + (f"Use LaneOrder(lanes={next(fits)}), or" if most else "Make blocks smaller, or use")
            + " a larger memory_limit."
        )

    def draw(self, layout: LayoutLike, positions: Int64Array, seed: int, epoch: int) -> Int64Array:
        positions = positions % total_samples(layout)
        return self._epoch(layout, seed, epoch).samples(positions) if self.shuffle else positions

    def _epoch(self, layout: LayoutLike, seed: int, epoch: int) -> LanedEpoch:
        lanes = self.lane_count(layout)
        key = (layout_digest(layout), lanes, self.window, seed, epoch)
        return _epochs.get(key, lambda: LanedEpoch.of(block_samples(layout), lanes, self.window, seed, epoch))


@dataclasses.dataclass(frozen=True, eq=False)
class LanedEpoch:
    """One epoch's permuted blocks, cut into lanes.

    Attributes:
        table: the permuted blocks.
        bounds: the places where lanes start, and the end, int64 (lanes + 1,).
        first: the block, by its number in the stream, where a lane starts, int64 (lanes,).
        rotation: the offset, within its first block, at which a lane is begun, int64 (lanes,).
        window: blocks that are permuted together.
        key: the 64-bit key of the permutations inside windows.
    """

    table: BlockPlaces
    bounds: Int64Array
    first: Int64Array
    rotation: Int64Array
    window: int
    key: int

    @classmethod
    def of(cls, samples: Int64Array, lanes: int, window: int, seed: int, epoch: int) -> LanedEpoch:
        """The epoch of blocks with these numbers of samples."""
        table = BlockPlaces.of(samples, spread(samples, lanes, seed, epoch))
        share, rest = divmod(int(samples.sum()), lanes)
        lane = np.arange(lanes + 1, dtype=np.int64)
        bounds = lane * share + np.minimum(lane, rest)
        # An empty lane at the stream's end lies in no block; it is never read.
        first = np.minimum(table.find(bounds[:-1]), len(samples) - 1)
        in_first = np.maximum(np.minimum(table.ends[first], bounds[1:]) - bounds[:-1], 1)
        drawn = derived_keys(key64("rotation", seed, epoch), lane[:-1])
        rotation = (drawn % in_first.astype(np.uint64)).astype(np.int64)
        return cls(table, bounds, first, rotation, window, key64("window", seed, epoch))

    @property
    def lanes(self) -> int:
        return len(self.first)

    def samples(self, positions: Int64Array) -> Int64Array:
        """The samples at positions 0..N-1."""
        lane = positions % self.lanes
        start, stop = self.bounds[lane], self.bounds[lane + 1]
        place = start + (positions // self.lanes + self.rotation[lane]) % (stop - start)
        block = self.table.find(place)
        # The windows of blocks of a lane: their numbers, first places, and ends.
        number = (block - self.first[lane]) // self.window
        first = self.first[lane] + number * self.window
        last = np.minimum(first + self.window, len(self.table.ends)) - 1
        low = np.maximum(self.table.starts(first), start)
        high = np.minimum(self.table.ends[last], stop)
        place = low + permute(place - low, high - low, derived_keys(self.key, lane, number))
        if self.window > 1:
            block = self.table.find(place)
        return self.table.samples(place, block)


_epochs: BoundedMemo[LanedEpoch] = BoundedMemo(64 << 20, lambda epoch: epoch.table.nbytes)


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
