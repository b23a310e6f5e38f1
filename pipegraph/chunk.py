"""The unit that travels on an edge: data of one or more samples, with their identity and their place in the stream.

A chunk carries two kinds of identity:

* a **lineage** says what a sample *is*: ``(source, position, child, child ...)``. It keys the
  sample's random numbers and names it in messages;
* a **cursor** is a restart point: a value from which the stage that made it can resume. ``before`` resumes
  with this chunk, ``after`` with the next one. Cursors of one edge sort like its chunks. One-to-one stages
  pass them on unchanged.

Two tokens travel beside chunks: :class:`EndOfEpoch` and :class:`Failure` (in place of the failed item).

The engine's words, one for each idea:

* A **plan** says what will run. A **run** is its wiring for consecutive epochs: of each **stage** its **workers**, each
  with its copy of the **operator**, and the **channels** between stages. A **pass** is one loop of the user over the
  run's output.
* A **block** is what a worker takes at once: a chunk, or a bundle of **rows** (``bundle``). An **item** is a block or a
  token.
* A **ticket** is the number with which a worker took its item. Results leave in this order, or as they finish.
* ``do(block, at)`` does a block's rows from one on; its **outcome** is what was made, and the error of the next row.
  The **policy** answers the error: the row is tried again, left out, or becomes a failure.
* A **host** is what a worker has in place of its operator where that runs in a process or an actor (a **child**).
* A **step** is the number of an item in a rank's share of an epoch, a **position** the number of a sample in the epoch
  of all ranks, an **ordinal** the number of an item of a stage, which budgets count. A **snapshot** is a state of an
  operator or iterator from which a **restart** continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from pipegraph.batches import Note, noted
from pipegraph.tree import copy_containers

if TYPE_CHECKING:
    from numpy.typing import NDArray

Lineage = tuple[Any, ...]
"""``(source stage name, global position, child index, ...)``."""

Cursor = Any
"""A JSON-serialisable restart point; ``None`` is the start of the epoch. See ``docs/resuming.md``."""


class Lineages(Sequence[Lineage]):
    """A lazy sequence: the lineages of several samples of one source, each built on access.

    Compares equal to the tuple of the same lineages.

    Examples:
        >>> Lineages("numbers", [7, 8])[1]
        ('numbers', 8)
    """

    __slots__ = ("positions", "source")

    def __init__(self, source: str, positions: list[int] | range) -> None:
        self.source = source
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Lineage]:
        source = self.source
        return iter([(source, position) for position in self.positions])

    @overload
    def __getitem__(self, index: int) -> Lineage: ...

    @overload
    def __getitem__(self, index: slice) -> Lineages: ...

    def __getitem__(self, index: int | slice) -> Lineage | Lineages:
        found = self.positions[index]
        return (self.source, found) if isinstance(found, int) else Lineages(self.source, found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lineages | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Chunk:
    """Data for one sample or a batch of samples.

    Attributes:
        data: the sample (any tree), or the batch: the same tree with the sample dimension first.
        lineages: one per sample.
        epoch: the epoch it belongs to.
        batched: whether ``data`` has a sample dimension.
        layout: for a batch, which of its parts are known to have a row per sample; see ``pipegraph.batches``.
        before, after: cursors of the edge it travels on.
        buffers: ``(id, nbytes)`` of each distinct buffer under ``data``, as the memory account counts them.
        nbytes: their sum; the engine measures both when a stage has made the chunk.
        packed: the slab that holds all tensors of ``data``, if the next stage copies it to a device; else None.
        ready: events of copies under way; the loader makes its consumer's streams wait for them.
        spans: of a batch whose rows were made of several samples each: how many samples each row has; else None.
        paths: per sample, the fan-in inputs that it passed through; only kept below completion-order stages.
    """

    __slots__ = (
        "_keys after batched before buffers data epoch layout lineages nbytes packed paths ready spans"
    ).split()
    count = 1  # what is done as one: a bundle has several

    def __init__(
        self,
        data: Any,
        lineages: Sequence[Lineage],
        epoch: int = 0,
        before: Cursor = 0,
        after: Cursor = 0,
        keys: tuple[Any, ...] | None = None,
        batched: bool = False,
        layout: Note = None,
    ) -> None:
        self.data = data
        self.lineages = lineages
        self.epoch = epoch
        self.before = before
        self.after = after
        self.batched = batched
        self.layout = layout
        self.buffers: tuple[tuple[int, int], ...] = ()
        self.nbytes = 0
        self.paths: tuple[tuple[int, ...], ...] | None = None
        self.packed: Any = None
        self.ready: tuple[Any, ...] = ()
        self.spans: tuple[int, ...] | None = None
        self._keys = keys

    @property
    def keys(self) -> tuple[Any, ...]:
        """One key per sample: its ``"key"`` field, else its position (then its lineage without the source)."""
        keys = self._keys
        if keys is None:
            lineages = self.lineages
            if isinstance(lineages, Lineages):
                keys = tuple(lineages.positions)
            else:
                keys = tuple(lineage[1] if len(lineage) == 2 else lineage[1:] for lineage in lineages)
            data = self.data
            if isinstance(data, Mapping) and "key" in data:
                found = data["key"]
                if not self.batched:
                    keys = self._keys = (found,)
                elif isinstance(found, list | tuple) and len(found) == len(keys):
                    keys = self._keys = tuple(found)
        return keys

    @keys.setter
    def keys(self, keys: tuple[Any, ...] | None) -> None:
        self._keys = keys

    @property
    def own_keys(self) -> tuple[Any, ...] | None:
        """The keys that the samples brought along or were given; None where their positions serve as keys."""
        keys = self.keys
        return None if self._keys is None else keys

    @property
    def positions(self) -> NDArray[np.int64]:
        """(samples,) int64: positions in the epoch's order of each sample's source, one for each sample.

        With a ``pg.order``: 0..N-1 of all ranks, and N or more for padding. With a sampler: step * world size + rank.
        """
        lineages = self.lineages
        found = lineages.positions if isinstance(lineages, Lineages) else (lineage[1] for lineage in lineages)
        return np.fromiter(found, np.int64, len(lineages))

    @property
    def sources(self) -> tuple[str, ...]:
        """(samples,): the name of each sample's source stage."""
        return tuple(lineage[0] for lineage in self.lineages)

    def __len__(self) -> int:
        return len(self.lineages)

    def __repr__(self) -> str:
        what = f"{len(self.lineages)} samples" if self.batched else f"sample {self.keys[0]!r}"
        return f"<Chunk {what}, epoch {self.epoch}, {self.nbytes} bytes>"

    def replace(self, data: Any) -> Chunk:
        """A chunk of the same samples with new data."""
        chunk = Chunk(
            data, self.lineages, self.epoch, self.before, self.after, self._keys, self.batched, self.layout
        )
        chunk.paths = self.paths
        chunk.spans = self.spans
        chunk.ready = self.ready
        if self._keys is None and isinstance(self.data, Mapping) and "key" in self.data:
            chunk._keys = self.keys  # a sample keeps its key even if a function drops the field
        return chunk

    def one(self, index: int) -> Chunk:
        """What is done as one by itself; of a bundle, sample ``index``."""
        return self

    def copied(self) -> Chunk:
        """This chunk with copies of the containers of its data, for a function that may change them and fail."""
        return self.replace(copy_containers(self.data))

    def child(self, index: int, data: Any) -> Chunk:
        """Child ``index`` that an expanding operator made from this chunk's single sample."""
        row = (*self.lineages[0], index)
        chunk = Chunk(data, (row,), self.epoch, self.before, self.after)
        chunk.ready = self.ready
        if self.paths is not None:
            chunk.paths = self.paths[:1]
        return chunk

    @property
    def row_lineages(self) -> Sequence[Lineage]:
        """One lineage per row of a batch: that of its first sample."""
        if self.spans is None:
            return self.lineages
        return [self.lineages[self.samples_of(row)[0]] for row in range(len(self.spans))]

    def samples_of(self, row: int) -> Sequence[int]:
        """The numbers of the samples of which a row was made; usually one, its own."""
        if self.spans is None:
            return (row,)
        start = sum(self.spans[:row])
        return range(start, start + self.spans[row])

    def row(self, index: int, data: Any) -> Chunk:
        """Row ``index`` of this batch, with its own lineage."""
        of = self.samples_of(index)
        keys = None if self._keys is None else tuple([self._keys[i] for i in of])
        lineages = tuple([self.lineages[i] for i in of])
        chunk = Chunk(data, lineages, self.epoch, self.before, self.after, keys)
        chunk.ready = self.ready
        if self.paths is not None:
            chunk.paths = tuple([self.paths[i] for i in of])
        return chunk

    def select(self, indices: Sequence[int], data: Any) -> Chunk:
        """A batch of the samples ``indices`` of this one."""
        chunk = self.replace(data)
        chunk.shorten(indices, data)
        return chunk

    def shorten(self, kept: Sequence[int], data: Any) -> None:
        """Keep only the rows ``kept`` of this batch, whose data is ``data``."""
        keys = self.keys
        if self.spans is not None:
            samples = [sample for row in kept for sample in self.samples_of(row)]
            self.spans, kept = tuple([self.spans[row] for row in kept]), samples
        self.lineages, self.keys = tuple(self.lineages[i] for i in kept), tuple(keys[i] for i in kept)
        if self.paths is not None:
            self.paths = tuple(self.paths[i] for i in kept)
        self.data = data

    @staticmethod
    def group(chunks: Sequence[Chunk], data: Any, batched: bool = True, transposed: bool = False) -> Chunk:
        """Join consecutive chunks: the result restarts with the first and continues after the last.

        Args:
            batched: whether ``data`` has a sample dimension.
            transposed: whether its lists are columns, as ``torch.utils.data.default_collate`` makes them from lists.
        """
        if not chunks:
            raise ValueError("Chunk.group joins the chunks that a group is made of, and was given none")
        first = chunks[0]
        lineages: list[Lineage] = []
        ready: tuple[Any, ...] = ()
        for chunk in chunks:
            lineages += chunk.lineages
            ready += chunk.ready
        grouped = Chunk(data, tuple(lineages), first.epoch, first.before, chunks[-1].after, None, batched)
        grouped.ready = ready
        if any(chunk._keys is not None for chunk in chunks) or isinstance(first.data, Mapping):
            grouped._keys = tuple(key for chunk in chunks for key in chunk.keys)
        if batched and not first.batched:
            grouped.layout = noted(data, [chunk.data for chunk in chunks], transposed)
            if len(lineages) != len(chunks):
                grouped.spans = tuple([len(chunk.lineages) for chunk in chunks])
        if first.paths is not None:
            grouped.paths = tuple(path for chunk in chunks for path in chunk.paths or ((),) * len(chunk))
        return grouped


class _NoMemory:
    """What tokens hold, as chunks say it."""

    __slots__ = ()
    buffers = ()
    nbytes = 0
    count = 1


@dataclass(slots=True, eq=False)
class EndOfEpoch(_NoMemory):
    """The stage that sent this token has sent all of ``epoch``."""

    epoch: int
    before: Cursor = None
    after: Cursor = None


@dataclass(slots=True, eq=False)
class Failure(_NoMemory):
    """An exception, in the failed item's place in the stream."""

    error: BaseException
    epoch: int
    count = 0  # it takes no room: see ``engine/contents.py``


Token = EndOfEpoch | Failure
Item = Chunk | Token
