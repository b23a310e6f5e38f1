"""When the ranks of a node read each block: intervals of steps, for caches that know the future.

Pure, vectorised, and with memory for blocks: of an order that permutes single samples through the whole data, every
block is read all the time, and only the next steps are looked at, sample by sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pipegraph.order._spans import Shares, runs_of
from pipegraph.order.layout import Int64Array

NEVER = 1 << 62

Found = tuple[Int64Array, Int64Array, Int64Array]
"""Of each visit the block, its first step and its last one."""


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

    def soonest(self, step: int, limit: int) -> Int64Array:
        """Up to `limit` blocks that are read from a step on, the soonest first."""
        number = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        kept = self.last >= step
        by_step = np.argsort(self.first[kept], kind="stable")
        _, place = np.unique(number[kept][by_step], return_index=True)
        soonest: Int64Array = number[kept][by_step][np.sort(place)[:limit]]
        return soonest


_none = np.empty(0, np.int64)
NOTHING = Visits(np.zeros(1, np.int64), _none, _none)


def pieces_of(shares: Shares, ranks: Sequence[int]) -> Found:
    """Low and high place of what these ranks read, span by span, and the step at which each begins."""
    found = []
    for rank in ranks:
        start, stop = shares.bounds[rank : rank + 1], shares.bounds[rank + 1 : rank + 2]
        pieces = shares.spans.cut(start, stop)
        found.append((pieces.low, pieces.high, pieces.ends - (pieces.high - pieces.low)))
    low, high, step = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return low, high, step


def overlaps(starts: Int64Array, low: Int64Array, high: Int64Array, step: Int64Array) -> Found:
    """The blocks in each run low..high-1 of samples that is read from a step on, one after the other."""
    kept = high > low
    low, high, step = low[kept], high[kept], step[kept]
    first = np.searchsorted(starts, low, side="right") - 1
    run, number = runs_of(first, np.searchsorted(starts, high, side="left") - first)
    begin = np.maximum(starts[number], low[run]) - low[run] + step[run]
    end = np.minimum(starts[number + 1], high[run]) - low[run] + step[run]
    return number, begin, end - 1
