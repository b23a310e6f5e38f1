"""Which blocks a rank reads, and when: pure functions and small values over an order's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipegraph.contracts import History
from pipegraph.order.layout import Int64Array


@dataclass(frozen=True)
class RankSteps:
    """One epoch's steps on one rank, as a ``ShardSelect`` deals them.

    Attributes:
        start, stop: the first step that is dealt, and the steps that the epoch has left for the rank.
        blocks: the block (or whole part) that each of the steps first..last-1 reads, int64.
        history: pairs (world size, samples per rank) consumed before step 0.
    """

    epoch: int
    seed: int
    start: int
    stop: int
    blocks: Callable[[int, int], Int64Array]
    history: History = ()


@dataclass(frozen=True, eq=False)
class Uses:
    """The blocks that a run of steps reads, each once, by their first step; int64 arrays of one length.

    Attributes:
        end: the step behind the last one.
        ticks: every step, those of one block together and in order, the blocks by their number.
        known: the blocks by their number; ``starts``: where each one's steps start in ``ticks``, and the end.
    """

    numbers: Int64Array
    first: Int64Array
    end: int
    ticks: Int64Array
    known: Int64Array
    starts: Int64Array

    @staticmethod
    def of(blocks: Int64Array, start: int) -> Uses:
        """Of the blocks that steps start, start+1 ... read."""
        grouped = np.argsort(blocks, kind="stable")
        known, begin = np.unique(blocks[grouped], return_index=True)
        starts = np.append(begin, len(blocks)).astype(np.int64)
        ticks = grouped.astype(np.int64) + start
        first = ticks[starts[:-1]]
        by_step = np.argsort(first)
        return Uses(known[by_step], first[by_step], start + len(blocks), ticks, known, starts)

    def next_use(self, number: int, step: int) -> int | None:
        """The first of these steps, from ``step`` on, that reads a block; None if none does."""
        at = int(np.searchsorted(self.known, number))
        if at == len(self.known) or self.known[at] != number:
            return None
        begin, end = int(self.starts[at]), int(self.starts[at + 1])
        place = begin + int(np.searchsorted(self.ticks[begin:end], step))
        return int(self.ticks[place]) if place < end else None
