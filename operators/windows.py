"""``Shuffle`` and ``Bucket`` hold consecutive chunks and let them leave in another order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, final

from pipegraph.chunk import Chunk, Cursor
from pipegraph.contracts import Context, Regroup, Traits
from pipegraph.errors import GraphError
from pipegraph.integers import amount, integer
from pipegraph.operators.batching import check_cost, cost_of
from pipegraph.parameters import function_name, plain_function
from pipegraph.randomness import generator


@final
class Shuffle(Regroup):
    """Shuffle the items within consecutive windows; each window's order depends on the seed and its number.

    Args:
        window: items per window. They are held until the window is full.

    Raises:
        GraphError: ``window`` is below 1.
    """

    traits = Traits(seeds_itself=True)

    def __init__(self, window: int) -> None:
        self.window = integer(window, "Shuffle: window")
        self._context = Context("")
        self.begin()

    def config(self) -> dict[str, Any]:
        return {"window": self.window}

    def length(self, n: int) -> int | None:
        return n

    def open(self, context: Context) -> None:
        self._context = context

    def begin(self) -> None:
        self._open: list[Chunk] = []
        self._number = 0
        self._drop = 0

    def resume(self, cursor: Cursor) -> Cursor:
        up, self._number, self._drop = cursor[:3]
        return up

    def handed_on(self, cursor: Cursor, more: int, draw: tuple[Any, ...]) -> tuple[Cursor, str, int] | None:
        if cursor is None:
            return (None, "", 0) if not more else None
        up, number, index, *window = cursor
        left = index + more
        if not left:
            return up, "", 0
        if not window or window[0]["spans"] is None:
            return None
        spans = _spans(window[0]["spans"])
        if left > len(spans) or (more and any(span.bit_count() > 1 for span in spans)):
            return None
        seed, epoch, stage = draw
        order = generator(seed, epoch, ("window", number), stage).permutation(len(spans))
        bits = 0
        for i in order[:left].tolist():
            bits |= spans[i]
        return up, f"{bits:x}", 0

    def process(self, chunk: Chunk) -> Iterable[Chunk]:
        self._open.append(chunk)
        return self._close() if len(self._open) == self.window else ()

    def flush(self) -> Iterable[Chunk]:
        made = self._close() if self._open else ()
        self._number = self._drop = 0
        return made

    def _close(self) -> list[Chunk]:
        chunks, self._open = self._open, []
        rng = generator(self._context.seed, chunks[0].epoch, ("window", self._number), self._context.stage)
        start, after = chunks[0].before, chunks[-1].after
        shuffled = [chunks[i] for i in rng.permutation(len(chunks))]
        window = {"spans": _described(chunks)}  # in a dict, which cursors are not compared by
        for index, chunk in enumerate(shuffled):
            chunk.before = (start, self._number, index, window)
            chunk.after = (start, self._number, index + 1, window)
        self._number += 1
        shuffled[-1].after = (after, self._number, 0, {"spans": None})
        drop, self._drop = self._drop, 0
        return shuffled[drop:]


def _described(chunks: Sequence[Chunk]) -> int | str | None:
    """Which steps of a source the chunks of a window stand for, short enough for every cursor of it.

    A number of single steps in a row; else a hexadecimal number with a bit for each step at which a chunk begins,
    and one at their end; None where the cursors above are not steps.
    """
    first, last = chunks[0].before, chunks[-1].after
    if not isinstance(first, int) or not isinstance(last, int):
        return None
    if last - first == len(chunks):
        return len(chunks)
    bits = 1 << last - first
    for chunk in chunks:
        bits |= 1 << chunk.before - first
    return f"{bits:x}"


def _spans(described: int | str) -> list[int]:
    """The reverse of :func:`_described`: for each chunk the bits of its steps, up to where the next one begins."""
    if isinstance(described, int):
        return [1 << step for step in range(described)]
    bits = int(described, 16)
    begins = [step for step in range(bits.bit_length()) if bits >> step & 1]
    return [(1 << stop) - (1 << start) for start, stop in pairwise(begins)]


@dataclass(slots=True, eq=False)
class _Held:
    """A sample that a bucket holds, and how things stood when it came."""

    chunk: Chunk
    start: Cursor
    counts: tuple[int, ...]
    sums: tuple[float, ...]
    emitted: int


@final
class Bucket(Regroup):
    """Group samples of similar length: the samples of one bucket leave one after the other, as a group.

    Args:
        length: a function that returns the length of a sample.
        boundaries: increasing; bucket i takes lengths from boundaries[i-1] up to, not including, boundaries[i].
        size: samples per group, usually the size of the ``Batch`` that follows; 32 if no ``cost`` is given.
        cost, limit: instead of ``size``: a group takes samples while the sum of ``cost(sample)`` is at most ``limit``,
            such as a budget of tokens. A ``Batch`` directly after it, with the same cost and limit, makes a batch of
            each group.

    A cursor is ``(outputs, start, counts, drop)``: restart where the oldest sample that has not left came
    in, with that number already in each bucket (only counted, as they have left since), and drop the first outputs.
    ``counts`` holds the number and the cost in each bucket; without ``cost`` each sample costs 1.

    Raises:
        DataError: one sample costs more than ``limit``.
    """

    needs = "sample"

    def __init__(
        self,
        length: Callable[[Any], float],
        boundaries: Sequence[float],
        size: int | None = None,
        cost: Callable[[Any], float] | None = None,
        limit: float | None = None,
    ) -> None:
        bounds = [amount(each, "Bucket: each boundary", -inf, GraphError) for each in boundaries]
        plain_function(length, "Bucket: length", "a sample")
        if bounds != sorted(set(bounds)):
            raise GraphError(f"Bucket: boundaries must grow, got {bounds}")
        check_cost(cost, limit, "Bucket")
        if cost is not None and size is not None:
            raise GraphError("Bucket: give size, or cost with limit, not both")
        self.measure = length
        self.boundaries = bounds
        self.size = integer(32 if size is None else size, "Bucket: size")
        self.cost = cost
        self.limit: float = self.size if limit is None else limit
        self.begin()

    def config(self) -> dict[str, Any]:
        found = {"length": function_name(self.measure), "boundaries": self.boundaries}
        if self.cost is None:
            return {**found, "size": self.size}
        return {**found, "cost": function_name(self.cost), "limit": self.limit}

    @property
    def traits(self) -> Traits:
        if self.cost is None:
            return Traits(functions=(self.measure,))
        return Traits(functions=(self.measure, self.cost), key=self._bucket_of)

    def length(self, n: int) -> int | None:
        return n

    def begin(self) -> None:
        buckets = len(self.boundaries) + 1
        self._ghosts = [0] * buckets  # of each bucket: how many have left before the restart
        self._buckets: list[list[_Held]] = [[] for _ in self._ghosts]
        # Of what is held and of the ghosts, added one by one: another order would round otherwise.
        self._sums: list[float] = [0] * buckets
        self._emitted = 0
        self._drop = 0
        self._last: Cursor = None

    def resume(self, cursor: Cursor) -> Cursor:
        emitted, start, (counts, sums), drop = cursor
        self._ghosts, self._sums = list(counts), list(sums)
        self._emitted, self._drop, self._last = emitted - drop, drop, cursor
        return start

    def _bucket_of(self, sample: Any) -> int:
        return bisect_right(self.boundaries, amount(self.measure(sample), "Bucket: length(sample)", -inf))

    def process(self, chunk: Chunk) -> Iterable[Chunk]:
        number = self._bucket_of(chunk.data)
        cost = 1 if self.cost is None else cost_of(self.cost, chunk.data, self.limit, "Bucket")
        counts = tuple(g + len(b) for g, b in zip(self._ghosts, self._buckets, strict=True))
        sums = tuple(self._sums)
        held = _Held(chunk, chunk.before, counts, sums, self._emitted)
        made: list[Chunk] = []
        if counts[number] and sums[number] + cost > self.limit:
            made = self._release(number, None, held)  # this one does not fit with it any more
        self._buckets[number].append(held)
        self._sums[number] += cost
        if self.cost is None and self._sums[number] >= self.limit:
            made = self._release(number, chunk.after)
        return made

    def flush(self) -> Iterable[Chunk]:
        made = []
        for number in range(len(self._buckets)):
            made += self._release(number, None)
        self.begin()
        return made

    def _release(self, number: int, after: Cursor, coming: _Held | None = None) -> list[Chunk]:
        ghosts, leaving = self._ghosts[number], self._buckets[number]
        self._ghosts[number], self._buckets[number], self._sums[number] = 0, [], 0
        self._emitted += ghosts
        self._drop = max(0, self._drop - ghosts)
        oldest = min((b[0] for b in self._buckets if b), key=_arrival, default=coming)
        made = []
        for index, held in enumerate(leaving):
            self._emitted += 1
            others = [each for each in (oldest, *leaving[index + 1 : index + 2]) if each is not None]
            first = min(others, key=_arrival, default=None)
            if first is None and after is not None:
                zeros = (0,) * len(self._ghosts)
                cursor: Cursor = (self._emitted, after, (zeros, zeros), 0)
            else:
                back = first or held  # at the end of the epoch: its last sample
                cursor = (self._emitted, back.start, (back.counts, back.sums), self._emitted - back.emitted)
            if self._drop:
                self._drop -= 1
                continue
            held.chunk.before, held.chunk.after = self._last, cursor
            self._last = cursor
            made.append(held.chunk)
        return made


def _arrival(held: _Held) -> int:
    """How many samples had come in before it: those that had left, and those that were held."""
    return held.emitted + sum(held.counts)
