"""Which blocks a rank will read, and when: pure functions and small values over an order's steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from pipegraph.order.layout import Int64Array


@dataclass(frozen=True)
class Deal:
    """One epoch's steps on one rank, as a ``ShardSelect`` deals them.

    Attributes:
        epoch: its number.
        seed: the graph's.
        start: the first step that is dealt.
        stop: the steps that the epoch has left for the rank.
        blocks: the block (or whole part) that each of the steps first..last-1 reads, int64.
        history: pairs (world size, samples per rank) consumed before step 0.
    """

    epoch: int
    seed: int
    start: int
    stop: int
    blocks: Callable[[int, int], Int64Array]
    history: tuple[tuple[int, int], ...] = ()


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
