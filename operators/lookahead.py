"""Which blocks a rank will read, and when: pure functions and small values over an order's steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from pipegraph.order.lanes import LanedEpoch
from pipegraph.order.layout import Int64Array

NEVER: Final = 1 << 62


@dataclass(frozen=True)
class Deal:
    """One epoch's steps on one rank, as a ``ShardSelect`` deals them.

    Attributes:
        epoch: its number.
        seed: the graph's.
        start: the first step that is dealt.
        stop: the steps that the epoch has left for the rank.
        blocks: the block (or whole part) that each of the steps first..last-1 reads, int64.
        position: the global position of a step.
    """

    epoch: int
    seed: int
    start: int
    stop: int
    blocks: Callable[[int, int], Int64Array]
    position: Callable[[int], int]


@dataclass(frozen=True)
class Uses:
    """The blocks that a run of steps reads, each once, by their first step; int64 arrays of one length."""

    numbers: Int64Array
    first: Int64Array
    last: Int64Array

    @staticmethod
    def of(blocks: Int64Array, start: int) -> Uses:
        """Of the blocks that steps start, start+1 ... read."""
        numbers, first = np.unique(blocks, return_index=True)
        _, from_end = np.unique(blocks[::-1], return_index=True)
        last = len(blocks) - 1 - from_end
        by_step = np.argsort(first)
        return Uses(numbers[by_step], first[by_step] + start, last[by_step] + start)


@final
class Pace:
    """Seconds per step, from the latest strides; one thread at a time.

    A pause of training (an evaluation, a checkpoint) must not make blocks look less urgent than they are
    once it is over: the longest twentieth of the strides does not count.
    """

    def __init__(self) -> None:
        self._strides: deque[float] = deque(maxlen=64)

    def add(self, seconds_per_step: float) -> None:
        """Take another measurement."""
        self._strides.append(seconds_per_step)

    @property
    def mean(self) -> float | None:
        """None before the first measurement."""
        if not self._strides:
            return None
        kept = sorted(self._strides)[: len(self._strides) - len(self._strides) // 20]
        return math.fsum(kept) / len(kept)


def first_positions(epoch: LanedEpoch, lanes: Int64Array | None = None) -> Int64Array:
    """The first global position at which each block of a ``LaneOrder``'s epoch is read, int64 (blocks,).

    Args:
        lanes: only reads by these lanes count (those of a node's ranks); by default by any.

    A block that no such lane reads has ``NEVER``. Of a block that spans several lanes the first and the last
    are looked at.
    """
    table, bounds = epoch.table, epoch.bounds
    blocks = np.arange(len(table.ends))
    low, high = table.starts(blocks), table.ends
    found = np.full(len(blocks), NEVER, dtype=np.int64)
    wanted = np.ones(epoch.lanes, dtype=bool)
    if lanes is not None:
        wanted[:] = False
        wanted[lanes] = True
    for lane in (_lane_of(bounds, low), _lane_of(bounds, high - 1)):
        size = bounds[lane + 1] - bounds[lane]
        begin = np.maximum(low, bounds[lane]) - bounds[lane] - epoch.rotation[lane]
        end = np.minimum(high, bounds[lane + 1]) - bounds[lane] - epoch.rotation[lane]
        # A lane begins inside its first block: that block is read at once, and again at the lane's end.
        offset = np.where((begin < 0) & (end > 0), 0, begin % np.maximum(size, 1))
        usable = wanted[lane] & (high > low) & (size > 0)
        found = np.where(usable, np.minimum(found, offset * epoch.lanes + lane), found)
    by_number = np.empty_like(found)
    by_number[table.order] = found
    return by_number


def _lane_of(bounds: Int64Array, places: Int64Array) -> Int64Array:
    lane = np.searchsorted(bounds, places, side="right") - 1
    return np.clip(lane, 0, len(bounds) - 2)
