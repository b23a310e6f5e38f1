"""When the ranks of a node read which blocks: an order's epoch as intervals of steps, for caches that know the future.

Pure, vectorised, and with memory for blocks: of an order that permutes single samples through the whole data, every
block is read all the time, and only the next steps are looked at, sample by sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

import numpy as np

from pipegraph.order._spans import Shares
from pipegraph.order._stream import stream_gone
from pipegraph.order.base import Deal, Order
from pipegraph.order.block_order import BlockOrder
from pipegraph.order.lane_order import LaneOrder
from pipegraph.order.layout import Int64Array, LayoutLike, block_samples, part_samples, total_samples
from pipegraph.order.part_order import PartOrder
from pipegraph.order.strided_order import StridedOrder

NEVER = 1 << 62

Found = tuple[Int64Array, Int64Array, Int64Array]
"""Of each visit the block, its first step and its last one."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """Intervals of steps in which blocks are read, grouped by block, int64.

    Attributes:
        starts: where each block's visits begin in the other two, (blocks + 1,).
        first, last: the steps of each visit; every rank of the node takes a step at about the same time.
    """

    starts: Int64Array
    first: Int64Array
    last: Int64Array

    @staticmethod
    def of(blocks: int, found: Found) -> Visits:
        """Of visits in any order; those that are over before step 0 are left out."""
        number, first, last = (array[found[2] >= 0] for array in found)
        first = np.maximum(first, 0)
        # One sort by both; a rank's steps lie far below 2**40.
        by_block = np.argsort((number << 40) | first)
        starts = np.zeros(blocks + 1, dtype=np.int64)
        np.cumsum(np.bincount(number, minlength=blocks), out=starts[1:])
        return Visits(starts, first[by_block], last[by_block])

    def next_use(self, block: int, step: int) -> int:
        """Steps until a block is read, 0 while it is; ``NEVER`` if it is not."""
        for visit in range(int(self.starts[block]), int(self.starts[block + 1])):
            if self.last[visit] >= step:
                return max(0, int(self.first[visit]) - step)
        return NEVER

    def soonest(self, step: int, most: int) -> Int64Array:
        """The blocks that are read from a step on, the soonest first, at most so many."""
        number = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        kept = self.last >= step
        by_step = np.argsort(self.first[kept], kind="stable")
        _, place = np.unique(number[kept][by_step], return_index=True)
        soonest: Int64Array = number[kept][by_step][np.sort(place)[:most]]
        return soonest


_none = np.empty(0, np.int64)
NOTHING = Visits(np.zeros(1, np.int64), _none, _none)


def foresees_epochs(order: Order) -> bool:
    """Whether :func:`epoch_visits` knows an order's whole epoch."""
    permutes_all = isinstance(order, StridedOrder | BlockOrder) and order.shuffle
    return isinstance(order, LaneOrder | PartOrder | StridedOrder | BlockOrder) and not permutes_all


def epoch_visits(order: Order, layout: LayoutLike, deal: Deal, ranks: Sequence[int]) -> Visits:
    """The visits of an epoch by some of its ranks, steps counted from the end of the deal's history.

    Padding is left out: it repeats what was read before. Only for orders that :func:`foresees_epochs`.
    """
    samples = block_samples(layout)
    if isinstance(order, LaneOrder) and order.shuffle:
        found = _of_lanes(order, layout, deal, ranks)
    elif isinstance(order, PartOrder):
        found = _of_parts(order, layout, deal, ranks)
    elif isinstance(order, BlockOrder):
        found = _of_runs(order, layout, deal, ranks)
    else:
        ends = np.cumsum(samples)
        gone = stream_gone(deal)  # what is left before that is read at once
        first, last = ends - samples - gone, ends - 1 - gone
        found = np.arange(len(samples)), first // deal.world_size, last // deal.world_size
    return Visits.of(len(samples), found)


def drawn_visits(
    order: Order, layout: LayoutLike, deal: Deal, ranks: Sequence[int], start: int, stop: int
) -> Visits:
    """The visits of the steps start..stop-1, each step its own: exact for every order, at the cost of drawing them."""
    samples = block_samples(layout)
    ends = np.cumsum(samples)
    numbers, steps = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rank in ranks:
        drawn = order.indices(layout, deal.seed, deal.epoch, rank, deal.world_size, start, stop, deal.history)
        numbers.append(np.searchsorted(ends, drawn, side="right"))
        steps.append(start + np.arange(len(drawn), dtype=np.int64))
    number, step = np.concatenate(numbers), np.concatenate(steps)
    inside = number < len(samples)  # the samplers of torch's C++ front end may run past the end
    return Visits.of(len(samples), (number[inside], step[inside], step[inside]))


def _of_lanes(order: LaneOrder, layout: LayoutLike, deal: Deal, ranks: Sequence[int]) -> Found:
    epoch = order._epoch(layout, deal.seed, deal.epoch)
    table, bounds, lanes = epoch.table, epoch.bounds, epoch.lanes
    gone = stream_gone(deal)
    shared = int(np.gcd(lanes, deal.world_size))
    wanted = np.isin((np.arange(lanes) - gone) % shared, np.unique(np.asarray(ranks) % shared))
    # The pieces that lanes cut blocks into.
    low = np.sort(np.concatenate(([0], table.ends[:-1], bounds[:-1])), kind="stable")  # two runs: one merge
    low = low[(np.diff(low, prepend=-1) > 0) & (low < bounds[-1])]
    lane = np.searchsorted(bounds, low, side="right") - 1
    low, lane = low[wanted[lane]], lane[wanted[lane]]
    block = table.find(low)
    _, begin, end = epoch._windows(lane, block)
    size = bounds[lane + 1] - bounds[lane]
    begin, end = (place - bounds[lane] - epoch.rotation[lane] for place in (begin, end))
    # A lane begins inside its first window: that is read at once, and again at the lane's end.
    across, behind = (begin < 0) & (end > 0), end <= 0
    number = table.order[block]
    found = [
        (number[across], np.zeros_like(begin[across]), end[across], lane[across]),
        (
            number,
            np.where(across | behind, begin + size, begin),
            np.where(across, size, np.where(behind, end + size, end)),
            lane,
        ),
    ]
    number, begin, end, lane = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    first, last = begin * lanes + lane, (end - 1) * lanes + lane
    return number, (first - gone) // deal.world_size, (last - gone) // deal.world_size


def _of_parts(order: PartOrder, layout: LayoutLike, deal: Deal, ranks: Sequence[int]) -> Found:
    shares, table = order._shares(layout, deal), order._table(layout, deal.seed, deal.epoch)
    low, high, step = _pieces(shares, ranks)
    place = table.find(low)
    part_start = table.starts(place)
    part = table.order[place]
    starts = np.concatenate(([0], np.cumsum(block_samples(layout))))
    part_first = np.concatenate(([0], np.cumsum(part_samples(layout))))
    if not order.shuffle:
        # Places inside a part are its samples in their order.
        shift = part_first[part] - part_start
        return _overlaps(starts, low + shift, high + shift, step)
    # The samples of a part are permuted through all of its blocks.
    first_block = np.searchsorted(starts, part_first[part], side="left")
    last_block = np.searchsorted(starts, part_first[part + 1], side="left")
    many = last_block - first_block
    span = np.repeat(np.arange(len(part)), many)
    number = np.arange(len(span)) - np.repeat(np.cumsum(many) - many, many) + first_block[span]
    return number, step[span], step[span] + (high - low)[span] - 1


def _of_runs(order: BlockOrder, layout: LayoutLike, deal: Deal, ranks: Sequence[int]) -> Found:
    left = order._left(layout, deal)
    share = order._local_count(left.total, deal.world_size)
    bounds = np.minimum(np.arange(deal.world_size + 1, dtype=np.int64) * share, left.total)
    low, high, step = _pieces(Shares(left, bounds), ranks)
    starts = np.concatenate(([0], np.cumsum(block_samples(layout))))
    return _overlaps(starts, low, np.minimum(high, total_samples(layout)), step)


def _pieces(shares: Shares, ranks: Sequence[int]) -> Found:
    """Low and high place of what these ranks read, span by span, and the step at which each begins."""
    found = []
    for rank in ranks:
        start, stop = shares.bounds[rank : rank + 1], shares.bounds[rank + 1 : rank + 2]
        pieces = shares.spans.cut(start, stop)
        found.append((pieces.low, pieces.high, pieces.ends - (pieces.high - pieces.low)))
    low, high, step = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return low, high, step


def _overlaps(starts: Int64Array, low: Int64Array, high: Int64Array, step: Int64Array) -> Found:
    """The blocks in each run low..high-1 of samples that is read from a step on, one after the other."""
    kept = high > low
    low, high, step = low[kept], high[kept], step[kept]
    first = np.searchsorted(starts, low, side="right") - 1
    many = np.searchsorted(starts, high, side="left") - first
    run = np.repeat(np.arange(len(low)), many)
    number = np.arange(len(run)) - np.repeat(np.cumsum(many) - many, many) + first[run]
    begin = np.maximum(starts[number], low[run]) - low[run] + step[run]
    end = np.minimum(starts[number + 1], high[run]) - low[run] + step[run]
    return number, begin, end - 1
