"""Regrouping: ``Batch``, ``Unbatch``, ``Shuffle``, ``Bucket``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch

from pipegraph.batches import noted, resolved, take_row
from pipegraph.bundle import Bundle, joined
from pipegraph.chunk import Chunk, Cursor
from pipegraph.contracts import Context, Operator, Regroup
from pipegraph.errors import DataError, GraphError
from pipegraph.operators.collate import collate as stack
from pipegraph.operators.columns import batch_of, pack
from pipegraph.parameters import function_name
from pipegraph.randomness import generator
from pipegraph.tree import map_leaves


def _positive(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GraphError(f"{what} must be an int >= 1, got {value!r}")
    return value


@final
class Batch(Regroup):
    """Group consecutive samples.

    Args:
        size: samples per batch on this rank.
        drop_last: leave out a last batch that is not full.
        collate: makes the batch of the list of items; by default numbers, arrays and tensors are
            stacked to tensors, text, bytes, lists and objects become lists, and None is refused: see
            ``pipegraph.operators.collate``. ``collate=list`` gives the plain list.
        global_size: samples per batch over all ranks, in place of ``size``; must be a multiple of their number.
        cost, limit: in place of ``size``: samples while the sum of ``cost(sample)`` stays within ``limit``.
        pad: fills arrays, and lists of numbers (such as tokens), up to the longest: a value, or a mapping from field
            to value. Lists without it stay lists, whatever their lengths.
    """

    gives = "batch"
    needs = "sample"
    elastic = True
    consecutive = True

    def __init__(
        self,
        size: int | None = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        global_size: int | None = None,
        cost: Callable[[Any], float] | None = None,
        limit: float | None = None,
        pad: Any = None,
    ) -> None:
        given = [
            name
            for name, value in (("size", size), ("global_size", global_size), ("cost", cost))
            if value is not None
        ]
        if len(given) != 1:
            raise GraphError(
                f"Batch: give exactly one of size, global_size or cost with limit, got {given or 'none'}"
            )
        if (cost is None) != (limit is None):
            raise GraphError("Batch: cost and limit go together: Batch(cost=len_of, limit=4096)")
        for name, function in (("collate", collate), ("cost", cost)):
            if function is not None and not callable(function):
                raise GraphError(f"Batch: {name} must be a function, got {function!r}")
        self.size = None if size is None else _positive(size, "Batch: size")
        self.global_size = None if global_size is None else _positive(global_size, "Batch: global_size")
        self.drop_last = bool(drop_last)
        self.collate = collate
        self.cost, self.limit, self.pad = cost, limit, pad
        self.bundles = self.in_step = cost is None
        self.collects = cost is None and collate is None and pad is None
        self._transposes = collate is torch.utils.data.default_collate
        self._open: list[Chunk] = []
        self._bundles: list[Bundle] = []
        self._held = 0  # samples in them
        self._sum = 0.0

    def config(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "global_size": self.global_size,
            "drop_last": self.drop_last,
            "collate": None if self.collate is None else function_name(self.collate),
            "cost": None if self.cost is None else function_name(self.cost),
            "limit": self.limit,
            "pad": repr(self.pad),
        }

    def _per_rank(self, world_size: int) -> int | None:
        if self.global_size is None:
            return self.size
        if self.global_size % world_size:
            below = self.global_size - self.global_size % world_size
            raise GraphError(
                f"Batch: global_size={self.global_size} is not a multiple of the {world_size} ranks; "
                f"use {below or world_size} or {below + world_size}"
            )
        return self.global_size // world_size

    def open(self, context: Context) -> None:
        self.size = self._per_rank(context.world_size)
        self.begin()

    def group_size(self, world_size: int = 1) -> int:
        size = self._per_rank(world_size)
        assert size is not None
        return size

    def length_for(self, n: int, world_size: int) -> int | None:
        size = self._per_rank(world_size)
        if size is None:
            return None
        return n // size if self.drop_last else -(-n // size)

    def length(self, n: int) -> int | None:
        return self.length_for(n, 1)

    def begin(self) -> None:
        self._open, self._bundles, self._held, self._sum = [], [], 0, 0.0

    def fills(self, rows: int) -> bool:
        return self._held + rows >= self.group_size()

    def take_bundle(self, bundle: Bundle) -> Sequence[Chunk]:
        assert self.size is not None
        made: list[Chunk] = []
        rows = len(bundle.rows)
        missing = self.size - self._held
        while rows >= missing:
            whole = missing == rows
            bundles = [*self._bundles, bundle if whole else bundle.part(0, missing)]
            self._bundles = [] if whole else [bundle.part(missing, rows)]
            self._held = rows - missing
            made.append(self._join(bundles))
            if whole:
                return made
            bundle = self._bundles.pop()
            rows, missing = len(bundle.rows), self.size
        self._bundles.append(bundle)
        self._held = self.size - missing + rows
        return made

    def packing(self) -> Callable[[list[Any]], Any] | None:
        return pack if self.collate is None else None

    def _join(self, bundles: list[Bundle]) -> Chunk:
        batch = joined(bundles)
        self.failing = (batch,)
        if all(bundle.packed is not None for bundle in bundles):
            batch.data = batch_of([bundle.packed for bundle in bundles], self.pad)
        else:
            items = [item for bundle in bundles for item in bundle.items()]
            batch.data = self._collated(items)
            batch.layout = noted(batch.data, items, self._transposes)
        self.failing = ()
        return batch

    def process(self, chunk: Chunk) -> Iterable[Chunk]:
        open_chunks = self._open
        if self.cost is None:
            open_chunks.append(chunk)
            return self._close() if len(open_chunks) == self.size else ()
        cost = self.cost(chunk.data)
        assert self.limit is not None
        if cost > self.limit:
            raise DataError(f"Batch: one sample costs {cost}, more than limit={self.limit}")
        if self._sum + cost <= self.limit or not open_chunks:
            open_chunks.append(chunk)
            self._sum += cost
            return ()
        self._open, self._sum = [chunk], cost  # before the batch is made, which may fail
        return self._make(open_chunks)

    def emits_next(self) -> bool:
        return self.cost is not None or self.size is None or len(self._open) + 1 >= self.size

    def flush(self) -> Iterable[Chunk]:
        if self.drop_last and self.cost is None:
            self._open, self._bundles, self._held = [], [], 0
        if self._bundles:
            bundles, self._bundles, self._held = self._bundles, [], 0
            return [self._join(bundles)]
        return self._close() if self._open else ()

    def _close(self) -> list[Chunk]:
        chunks, self._open, self._sum = self._open, [], 0.0
        return self._make(chunks)

    def _make(self, chunks: list[Chunk]) -> list[Chunk]:
        items = [chunk.data for chunk in chunks]
        self.failing = chunks
        data = self._collated(items)
        self.failing = ()
        return [Chunk.group(chunks, data, transposed=self._transposes)]

    def _collated(self, items: list[Any]) -> Any:
        return self.collate(items) if self.collate is not None else stack(items, self.pad)


@final
class Unbatch(Operator):
    """Back to samples, each with the lineage it had.

    What has a row per sample is decided by the rule of ``pipegraph.batches``; what belongs to the whole batch goes to
    every sample.
    """

    kind = "expand"
    needs = "batch"
    gives = "sample"
    one_to_one = False
    elastic = True

    def process(self, chunk: Chunk) -> Iterator[Chunk]:
        count = len(chunk.rows)
        parts = resolved(chunk.data, chunk.layout, count)
        for index in range(count):
            # Copied: a view would keep the whole batch's memory for as long as one of its samples lives.
            yield chunk.row(index, map_leaves(_own, take_row(chunk.data, parts, index)))


def _own(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@final
class Shuffle(Regroup):
    """Permute consecutive disjoint windows, each by a draw keyed by its number.

    Args:
        window: items per window; they are held until it is full.
    """

    inputs_in = (0, 1)

    def __init__(self, window: int) -> None:
        self.window = _positive(window, "Shuffle: window")
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
        self.size = _positive(size, "Bucket: size")
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
