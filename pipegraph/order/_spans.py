"""The unconsumed part of a list dealt to ranks, as spans of positions, and how it is dealt again."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipegraph.order.layout import Int64Array
from pipegraph.order.left import Taken, runs_left


def runs_of(first: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The numbers first, first + 1 ... of each run, ``counts`` of them; and for each number the index of its run."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts) + first[run]


@dataclasses.dataclass(frozen=True, eq=False)
class Spans:
    """Half-open spans of places, read one after the other. None is empty.

    Attributes:
        low, high: int64 (spans,); the span is low..high-1.
    """

    low: Int64Array
    high: Int64Array

    @property
    def ends(self) -> Int64Array:
        """How many places lie up to each span's end, int64 (spans,)."""
        return np.cumsum(self.high - self.low)

    @property
    def total(self) -> int:
        return int((self.high - self.low).sum())

    def at(self, index: Int64Array) -> Int64Array:
        """The places at these numbers (below ``total``) of the reading."""
        ends = self.ends
        span = np.searchsorted(ends, index, side="right")
        return self.high[span] - (ends[span] - index)

    def cut(self, start: Int64Array, stop: Int64Array) -> Spans:
        """The spans that make up the intervals start..stop-1 of the reading, in their order."""
        kept = stop > start
        start, stop = start[kept], stop[kept]
        ends = self.ends
        first = np.searchsorted(ends, start, side="right")
        last = np.searchsorted(ends, stop, side="left")
        interval, span = runs_of(first, last - first + 1)
        shift = self.high[span] - ends[span]
        begin = ends[span] - (self.high - self.low)[span]
        return Spans(
            np.maximum(start[interval], begin) + shift, np.minimum(stop[interval], ends[span]) + shift
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """Spans and their division among ranks.

    Attributes:
        spans: all that is left.
        bounds: rank r reads the numbers bounds[r]..bounds[r+1]-1 of the spans' reading, int64
            (ranks + 1,). What lies behind the last bound belongs to no rank.
    """

    spans: Spans
    bounds: Int64Array

    @property
    def counts(self) -> Int64Array:
        """Places of each rank, int64 (ranks,)."""
        return np.diff(self.bounds)

    def left_after(self, consumed: int | tuple[Taken, ...]) -> Spans:
        """What is left when each rank has read so much of its own (or all it has)."""
        if isinstance(consumed, int):
            start = np.minimum(self.bounds[:-1] + consumed, self.bounds[1:])
            stop = self.bounds[1:]
        else:
            runs = [
                (low + begin, low + end)
                for low, count, taken in zip(
                    self.bounds.tolist(), self.counts.tolist(), consumed, strict=False
                )
                for begin, end in runs_left(taken, count)
            ]
            start, stop = np.array(runs, dtype=np.int64).reshape(-1, 2).T
        return self.spans.cut(np.append(start, self.bounds[-1]), np.append(stop, self.spans.total))
