"""Bundles: consecutive samples handed over together, each still a sample of its own.

Handing a small row to another thread costs more than reading it. So rows travel in bundles; the quicker the rows,
the larger the bundle (``bundle_size``). A single chunk is a bundle of one. A bundle is not a batch: only the
hand-over is shared, and users never see it:

* Each sample has the cursors, key and lineage that it would have alone. So states do not depend on bundles: a
  graph with bundles and one without load each other's.
* Every stage works on one sample after the other, with that sample's key, lineage, generator and policy.
* Finished samples wait for the rest of their bundle, which holds at most 1 ms of measured work (in processes 40).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

from pipegraph.chunk import Chunk, Cursor, Lineage, Lineages
from pipegraph.tree import copy_containers

Pack = Callable[[list[Any]], Any]
"""Packs rows as a ``Batch`` needs them; None where they cannot be packed. See ``StagePlan.packing``."""


class _Unnamed:
    """Sentinel for a key that is not fixed yet. A singleton in every process."""

    def __reduce__(self) -> str:
        return "UNNAMED"


UNNAMED = _Unnamed()


class _Dropped:
    """Sentinel for the data of a dropped sample. A singleton in every process."""

    def __reduce__(self) -> str:
        return "DROPPED"


DROPPED = _Dropped()


class Bundle(Chunk):
    """See the module docstring.

    Attributes:
        data: the list of samples.
        before, after: cursors of the first and of the last sample.
        places: ``(before, after)`` of each sample; None where they are consecutive steps of a source.
        count: how many samples.
        names: the key of each sample, or ``UNNAMED`` while it is not fixed; None if none is.
        packed: in place of ``data``, all samples as ``Columns`` or ``PackedParts``, for the ``Batch`` that will collect
            them, or as these or ``EncodedRows`` for the process that makes the samples of them.
    """

    __slots__ = ("count", "names", "packed", "places")

    def __init__(
        self,
        data: list[Any],
        rows: Sequence[Lineage],
        epoch: int,
        before: Cursor,
        names: list[Any] | None = None,
        places: list[tuple[Cursor, Cursor]] | None = None,
    ) -> None:
        self.count = len(rows)
        after = before + self.count if places is None else places[-1][1]
        super().__init__(data, rows, epoch, before, after)
        self.names = names
        self.places = places
        self.packed: Any = None

    @staticmethod
    def takes(chunk: Chunk) -> bool:
        """Whether a chunk may be part of a bundle: it has one sample, and nothing but data, keys and cursors."""
        return not (chunk.batched or len(chunk.lineages) > 1 or chunk.paths is not None or chunk.ready)

    @staticmethod
    def of(chunks: Sequence[Chunk]) -> Bundle:
        """A bundle of chunks, each of which it ``takes``."""
        first = chunks[0]
        names = None
        if any(chunk._keys is not None for chunk in chunks):
            names = [UNNAMED if chunk._keys is None else chunk._keys[0] for chunk in chunks]
        rows = [chunk.lineages[0] for chunk in chunks]
        places = [(chunk.before, chunk.after) for chunk in chunks]
        return Bundle([chunk.data for chunk in chunks], rows, first.epoch, first.before, names, places)

    def pack(self, pack: Pack, spans: list[tuple[int, int]]) -> None:
        """Pack the samples with ``pack``, those of each span by themselves, unless it returns None."""
        data = self.data
        parts = [pack(data if len(spans) == 1 else data[start:stop]) for start, stop in spans]
        if None in parts:
            return
        if parts[0].kind is dict:
            self.names = named(data, self.names)
        self.take_packed(PackedParts.of(parts, spans))

    def take_packed(self, packed: Any) -> None:
        """Replace the samples by their packed form."""
        self.packed, self.data = packed, ()
        if packed.kind is dict:
            self.names = list(_keys(self))  # as ``Chunk.group`` would fix them

    def unpack(self) -> None:
        """Make the samples of their packed form; the first that cannot be made is raised."""
        if self.packed is not None:
            self.data, self.packed = self.packed.rows(), None
            self.names = named(self.data, self.names)

    def items(self) -> list[Any]:
        """The samples."""
        found: list[Any] = self.data if self.packed is None else self.packed.rows()
        return found

    def place(self, index: int) -> tuple[Cursor, Cursor]:
        """The cursors of sample ``index``."""
        if self.places is None:
            return self.before + index, self.before + index + 1
        return self.places[index]

    def afters(self) -> Sequence[Cursor]:
        """The cursor after each sample."""
        if self.places is None:
            return range(self.before + 1, self.after + 1)
        return [after for _, after in self.places]

    def steps(self) -> Sequence[Cursor]:
        """The cursor before each sample."""
        if self.places is None:
            return range(self.before, self.before + self.count)
        return [before for before, _ in self.places]

    def stamp(self, before: Cursor, after: Cursor) -> None:
        """Set the cursors of all samples to ``before``, except the last one's ``after``."""
        self.places = [*[(before, before)] * (self.count - 1), (before, after)]
        self.before, self.after = before, after

    def replace(self, data: Any) -> Bundle:
        """A bundle of the same samples with new data."""
        return Bundle(data, self.lineages, self.epoch, self.before, self.names, self.places)

    def one(self, index: int) -> Chunk:
        """Sample ``index`` as a chunk."""
        if self.packed is not None:
            row = self.part(index, index + 1)
            row.unpack()
            return row.one(0)
        return self.named_one(index, self.data[index])

    def named_one(self, index: int, data: Any) -> Chunk:
        """A chunk of ``data`` in place of sample ``index``."""
        names, (before, after) = self.names, self.place(index)
        keys = None if names is None or names[index] is UNNAMED else (names[index],)
        return Chunk(data, (self.lineages[index],), self.epoch, before, after, keys)

    def copied(self) -> Bundle:
        return self.replace([copy_containers(item) for item in self.data])

    def part(self, start: int, stop: int) -> Bundle:
        """Samples ``start`` to ``stop``; their memory is still counted with this bundle."""
        part = Bundle(
            self.data[start:stop],
            self.lineages[start:stop],
            self.epoch,
            self.place(start)[0],
            None if self.names is None else self.names[start:stop],
            None if self.places is None else self.places[start:stop],
        )
        if self.packed is not None:
            part.packed = self.packed.part(start, stop)
        return part

    def share(self, start: int, stop: int) -> Bundle:
        """As :meth:`part`, with this bundle's buffers and the part's share of their bytes."""
        part, count = self.part(start, stop), self.count
        part.buffers = self.buffers
        part.nbytes = self.nbytes * stop // count - self.nbytes * start // count
        return part

    def chosen(self, indices: Sequence[int]) -> Bundle:
        """Some of the samples, at least one; their memory is still counted with this bundle."""
        data, rows, names = self.items(), self.lineages, self.names
        return Bundle(
            [data[index] for index in indices],
            Lineages(rows.source, [rows.positions[index] for index in indices])
            if isinstance(rows, Lineages)
            else [rows[index] for index in indices],
            self.epoch,
            self.place(indices[0])[0],
            None if names is None else [names[index] for index in indices],
            [self.place(index) for index in indices],
        )


class PackedParts:
    """Samples that were packed in several consecutive parts."""

    def __init__(self, parts: list[Any], spans: list[tuple[int, int]]) -> None:
        self.parts = parts
        self.spans = spans
        self.kind = parts[0].kind

    @staticmethod
    def of(parts: list[Any], spans: list[tuple[int, int]]) -> Any:
        """A single part as it is."""
        return parts[0] if len(parts) == 1 else PackedParts(parts, spans)

    def __len__(self) -> int:
        return self.spans[-1][1]

    def part(self, start: int, stop: int) -> Any:
        """Samples ``start`` to ``stop``, in the same memory; exactly one part is returned as it is."""
        parts, spans = [], []
        for at in range(bisect_right(self.spans, start, key=itemgetter(1)), len(self.spans)):
            part, (first, last) = self.parts[at], self.spans[at]
            if first >= stop:
                break
            low, high = max(start, first), min(stop, last)
            whole = low == first and high == last
            parts.append(part if whole else part.part(low - first, high - first))
            spans.append((low - start, high - start))
        return PackedParts.of(parts, spans)

    def rows(self) -> list[Any]:
        """The samples."""
        return [row for part in self.parts for row in part.rows()]

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """The buffers under them."""
        return tuple([each for part in self.parts for each in part.buffers()])


def named(data: Sequence[Any], names: list[Any] | None) -> list[Any] | None:
    """``names``, filled with the keys of the mappings that have one."""
    mappings = {kind for kind in set(map(type, data)) if issubclass(kind, Mapping)}
    if not mappings:
        return names
    found = [UNNAMED] * len(data) if names is None else list(names)
    for index, item in enumerate(data):
        if item.__class__ in mappings and found[index] is UNNAMED and "key" in item:
            found[index] = item["key"]
    return found


def filled(chunk: Chunk, item: Any) -> Chunk:
    """The chunk of a position with the item that was read there."""
    chunk.data = item
    if item.__class__ is dict and "key" in item:
        chunk.keys = (item["key"],)
    return chunk


def samples_of(chunk: Chunk) -> list[Any]:
    """The samples of a bundle, or of a chunk."""
    return chunk.items() if isinstance(chunk, Bundle) else [chunk.data]


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk, without data yet, for the samples of consecutive bundles and chunks.

    Lineages, keys and cursors are as in :meth:`Chunk.group`.
    """
    bundles = [chunk if isinstance(chunk, Bundle) else Bundle.of([chunk]) for chunk in chunks]
    first = bundles[0]
    rows: Sequence[Lineage] = first.lineages
    if len(bundles) > 1:
        if isinstance(rows, Lineages) and all(isinstance(bundle.lineages, Lineages) for bundle in bundles):
            found = [position for bundle in bundles for position in bundle.lineages.positions]  # type: ignore[attr-defined]
            rows = Lineages(rows.source, found)
        else:
            rows = [row for bundle in bundles for row in bundle.lineages]
    if not isinstance(rows, Lineages):
        rows = tuple(rows)
    grouped = Chunk(None, rows, first.epoch, first.before, bundles[-1].after, None, True)
    with_keys = first.packed is None and isinstance(first.data[0], Mapping)
    if with_keys or any(bundle.names is not None for bundle in bundles):
        grouped.keys = tuple(chain.from_iterable(map(_keys, bundles)))
    return grouped


def _keys(bundle: Bundle) -> Sequence[Any]:
    names, rows = bundle.names, bundle.lineages
    if bundle.packed is None:
        names = named(bundle.data, names)
    # Compared by identity: keys may be arrays, whose ``==`` is not a bool.
    if names is not None and not any(map(is_, names, repeat(UNNAMED))):
        return names
    positions: Sequence[Any]
    if isinstance(rows, Lineages):
        positions = rows.positions
    else:
        positions = [row[1] if len(row) == 2 else row[1:] for row in rows]
    if names is None:
        return positions
    return [at if name is UNNAMED else name for name, at in zip(names, positions, strict=True)]
