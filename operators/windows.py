"""Windows: ``Shuffle`` and ``Bucket``, which hold consecutive chunks and let them leave in another order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, final

from pipegraph.chunk import Chunk, Cursor
from pipegraph.contracts import Context, Regroup
from pipegraph.errors import GraphError
from pipegraph.operators.batching import positive
from pipegraph.parameters import function_name
from pipegraph.randomness import generator


@final
class Shuffle(Regroup):
    """Permute consecutive disjoint windows, each by a draw keyed by its number.

    Args:
        window: items per window; they are held until it is full.
    """

    inputs_in = (0, 1)

    def __init__(self, window: int) -> None:
        self.window = positive(window, "Shuffle: window")
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

    def begin_at(self, cursor: Cursor) -> Cursor:
        return (cursor, 0, 0)

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


class _Held:
    """A sample that a bucket holds, and how things stood when it came."""

    __slots__ = ("chunk", "counts", "emitted", "start")

    def __init__(self, chunk: Chunk, counts: tuple[int, ...], emitted: int) -> None:
        self.chunk = chunk
        self.start = chunk.before
        self.counts = counts
        self.emitted = emitted


@final
class Bucket(Regroup):
    """Samples of similar length together: ``size`` of one bucket leave one after the other.

    Args:
        length: the length of a sample.
        boundaries: growing; bucket i takes lengths from boundaries[i-1] up to, not including, boundaries[i].
        size: samples that leave together, best the size of the ``Batch`` that follows.

    A cursor is ``(outputs, start, counts, drop)``: restart where the oldest sample that has not left came
    in, with so many already in each bucket (they have left since, and are only counted), and drop the first outputs.
    """

    needs = "sample"
    inputs_in = (1, 2)

    def __init__(self, length: Callable[[Any], float], boundaries: Sequence[float], size: int = 32) -> None:
        bounds = list(boundaries)
        if not callable(length):
            raise GraphError(f"Bucket: length must be a function of a sample, got {length!r}")
        if bounds != sorted(set(bounds)):
            raise GraphError(f"Bucket: boundaries must grow, got {bounds}")
        self.measure = length
        self.boundaries = bounds
        self.size = positive(size, "Bucket: size")
        self.begin()

    def config(self) -> dict[str, Any]:
        return {"length": function_name(self.measure), "boundaries": self.boundaries, "size": self.size}

    def length(self, n: int) -> int | None:
        return n

    def begin(self) -> None:
        self._ghosts = [0] * (len(self.boundaries) + 1)
        self._buckets: list[list[_Held]] = [[] for _ in self._ghosts]
        self._emitted = 0
        self._drop = 0
        self._last: Cursor = None

    def begin_at(self, cursor: Cursor) -> Cursor:
        return (0, cursor, (0,) * (len(self.boundaries) + 1), 0)

    def resume(self, cursor: Cursor) -> Cursor:
        emitted, start, counts, drop = cursor
        self._emitted, self._ghosts, self._drop, self._last = emitted - drop, list(counts), drop, cursor
        return start

    def process(self, chunk: Chunk) -> Iterable[Chunk]:
        number = bisect_right(self.boundaries, self.measure(chunk.data))
        counts = tuple(g + len(b) for g, b in zip(self._ghosts, self._buckets, strict=True))
        self._buckets[number].append(_Held(chunk, counts, self._emitted))
        if self._ghosts[number] + len(self._buckets[number]) < self.size:
            return ()
        return self._release(number, chunk.after)

    def flush(self) -> Iterable[Chunk]:
        made = []
        for number in range(len(self._buckets)):
            made += self._release(number, None)
        self.begin()
        return made

    def _release(self, number: int, after: Cursor) -> list[Chunk]:
        ghosts, leaving = self._ghosts[number], self._buckets[number]
        self._ghosts[number], self._buckets[number] = 0, []
        self._emitted += ghosts
        self._drop = max(0, self._drop - ghosts)
        oldest = min((b[0] for b in self._buckets if b), key=_arrival, default=None)
        made = []
        for index, held in enumerate(leaving):
            self._emitted += 1
            waiting = leaving[index + 1] if index + 1 < len(leaving) else None
            first = _older(oldest, waiting)
            if first is None:
                cursor: Cursor = (self._emitted, after, (0,) * len(self._ghosts), 0)
                if after is None:  # the end of the epoch: restart with its last sample
                    cursor = (self._emitted, held.start, held.counts, self._emitted - held.emitted)
            else:
                cursor = (self._emitted, first.start, first.counts, self._emitted - first.emitted)
            if self._drop:
                self._drop -= 1
                continue
            held.chunk.before, held.chunk.after = self._last, cursor
            self._last = cursor
            made.append(held.chunk)
        return made


def _older(a: _Held | None, b: _Held | None) -> _Held | None:
    """Whichever came in first: more had come before the later one."""
    if a is None or b is None:
        return a or b
    return a if _arrival(a) <= _arrival(b) else b


def _arrival(held: _Held) -> int:
    """How many samples had come in before it: those that had left, and those that were held."""
    return held.emitted + sum(held.counts)
