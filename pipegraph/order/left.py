"""The part of an epoch that no rank has consumed yet. Pure."""

from __future__ import annotations

import dataclasses
import operator
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pipegraph.errors import GraphError, shown
from pipegraph.order.layout import Int64Array

Taken: TypeAlias = tuple[int, str]
"""What one rank has consumed of its steps: all below a number, and of those from there on the ones whose bit is set
in a hexadecimal number (the lowest bit is the first step)."""

Pair: TypeAlias = tuple[int, int | tuple[Taken, ...]]
"""A world size, and what its ranks consumed: all as many steps, or each its own."""

Pairs: TypeAlias = tuple[Pair, ...]


class Deal(NamedTuple):
    """What fixes the share of each rank: validated arguments, hashable."""

    seed: int
    epoch: int
    world_size: int
    history: Pairs


def check_history(history: Any) -> Pairs:
    """The history as tuples; JSON's lists are taken too.

    Raises:
        GraphError: it is not one.
    """
    return tuple(_pair(entry) for entry in history)


def _pair(entry: Any) -> Pair:
    try:
        ranks, consumed = entry
        each = [_taken(one) for one in consumed] if isinstance(consumed, list | tuple) else [_taken(consumed)]
        fits = operator.index(ranks) >= 1 and all(count >= 0 for count, _ in each)
    except (TypeError, ValueError):
        fits = False
    if not fits or (isinstance(consumed, list | tuple) and len(each) != ranks):
        raise GraphError(
            f"history must be pairs (world size >= 1, samples per rank >= 0), got {shown(entry)}. "
            "Pass the history of the state as it is."
        )
    if len(set(each)) == 1 and not each[0][1]:
        return operator.index(ranks), each[0][0]
    return operator.index(ranks), tuple(each)


def _taken(one: Any) -> Taken:
    if isinstance(one, list | tuple):
        count, bits = one
        return operator.index(count), f"{int(bits, 16):x}" if bits and int(bits, 16) else ""
    return operator.index(one), ""


def steps_begun(consumed: int | tuple[Taken, ...]) -> int:
    """The step behind the last one that any rank has consumed."""
    if isinstance(consumed, int):
        return consumed
    return max(count + len(_flags(bits)) for count, bits in consumed)


def runs_left(taken: Taken, length: int) -> Iterator[tuple[int, int]]:
    """The runs ``start, stop`` of steps that a rank with this many steps has not consumed."""
    count, bits = taken
    flags = _flags(bits)
    edges = np.flatnonzero(np.diff(np.concatenate(([True], flags, [False]))))
    # A run starts where the flag falls and stops where it rises; the last one reaches to the end.
    bounds = [*(count + edges).tolist(), length]
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        if min(stop, length) > start:
            yield start, min(stop, length)


def _flags(bits: str) -> Any:
    """(steps,) bool: which of a rank's steps from its count on were consumed; the last one was."""
    number = int(bits, 16) if bits else 0
    packed = np.frombuffer(number.to_bytes((number.bit_length() + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=number.bit_length(), bitorder="little").astype(bool)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Left:
    """Of one stream that is dealt to ranks in turn, the places that are left.

    Attributes:
        front: those before ``start``, int64, growing.
        start: from here on all are.
    """

    front: Int64Array
    start: int

    def at(self, numbers: Int64Array) -> Int64Array:
        """The places with these numbers, counted through all that are left."""
        ahead = len(self.front)
        if not ahead:
            return numbers + self.start
        found = numbers + (self.start - ahead)
        early = numbers < ahead
        found[early] = self.front[numbers[early]]
        return found

    def count(self, total: int) -> int:
        """How many are left of a stream of ``total`` places."""
        return bisect_left(self.front, total) + max(0, total - self.start)

    def after(self, ranks: int, consumed: int | tuple[Taken, ...]) -> Left:
        """What is left when each rank has consumed so much of its share of this."""
        if isinstance(consumed, int):
            return self._behind(ranks * consumed)
        low, high = min(count for count, _ in consumed), steps_begun(consumed)
        open_ = np.zeros((high - low, ranks), dtype=bool)
        for rank, taken in enumerate(consumed):
            for start, stop in runs_left(taken, high):
                open_[start - low : stop - low, rank] = True
        front = self.at(np.flatnonzero(open_) + low * ranks)
        rest = self._behind(high * ranks)
        return Left(np.concatenate((front, rest.front)), rest.start)

    def _behind(self, number: int) -> Left:
        ahead = len(self.front)
        return Left(self.front[number:], self.start + max(0, number - ahead))


@lru_cache(maxsize=64)
def left_of(history: Pairs) -> Left:
    """What a history leaves of a stream that is dealt to ranks in turn."""
    if not history:
        return Left(np.empty(0, dtype=np.int64), 0)
    return left_of(history[:-1]).after(*history[-1])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
        counts = last - first + 1
        # The spans first, first + 1 ... of each interval, and for each of them the number of its interval.
        interval = np.repeat(np.arange(len(counts)), counts)
        span = np.arange(len(interval)) + (first - np.cumsum(counts) + counts)[interval]
        shift = self.high[span] - ends[span]
        begin = ends[span] - (self.high - self.low)[span]
        return Spans(
            np.maximum(start[interval], begin) + shift, np.minimum(stop[interval], ends[span]) + shift
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
