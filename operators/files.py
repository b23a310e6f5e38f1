"""Samples from files and shards: ``ListFiles``, ``ShardSelect``, ``Load``."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Source
from pipegraph.errors import GraphError
from pipegraph.operators.indexed import local_manifest
from pipegraph.operators.ordered import OrderedSource
from pipegraph.order import LaneOrder, Order, PartOrder, StridedOrder
from pipegraph.storage import Manifest, Part, ShardFile, expand_parts, open_part
from pipegraph.storage.folders import FileList, list_files
from pipegraph.storage.formats import format_of

OPEN_PARTS = 256
"""Shards kept open at once, least recently used first to close: more than the lanes a rank reads from
(240 by default), and well under the usual limit of 1,024 descriptors."""


class _Once:
    """A value made at first need, shared by all copies of an operator."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: Any = None

    def get(self) -> Any:
        with self._lock:
            if self._value is None:
                self._value = self._make()
            return self._value


@final
class ListFiles(OrderedSource):
    """Files of a folder as samples ``{"key", "path"}``; with class folders ``"label"`` too.

    Args:
        root: the folder; it is listed at the first pass (or ``len``), below it too, hidden files left out.
        pattern: a glob on file names, such as ``"*.jpg"``.
        classes: whether the first folder of a path is the file's class; ``"auto"`` where all files lie in such folders.
        order: which file at which position.
    """

    default_name = "listfiles"

    def __init__(
        self,
        root: str | os.PathLike[str],
        pattern: str | None = None,
        classes: Literal["auto", True, False] = "auto",
        order: Order | None = None,
    ) -> None:
        super().__init__(order or StridedOrder(shuffle=False))
        self.root = os.fspath(root)
        self.pattern = pattern
        self.classes = classes
        self._files = _Once(lambda: list_files(self.root, self.pattern, self.classes))

    def files(self) -> FileList:
        """The files, in the order of their paths."""
        found: FileList = self._files.get()
        return found

    def layout(self) -> int:
        return len(self.files())

    def item(self, index: int) -> Any:
        return self.files()[index]

    def config(self) -> dict[str, Any]:
        return {"files": len(self.files()), "pattern": self.pattern, **self.order.config()}


class ShardSample(NamedTuple):
    """Sample ``index`` of part ``part`` of a ``ShardSelect``; ``Load`` reads it."""

    part: Part
    block: Any
    index: int


@final
class ShardSelect(OrderedSource):
    """Which sample of which shard comes next for this rank; ``Load`` reads it.

    With ``LaneOrder`` (default) and the other orders every sample has its position, and resuming costs
    nothing; the parts need a manifest, which for local ones is made before the first sample (headers only, once
    per node). ``order=PartOrder()`` without a manifest takes whole parts instead, one after the other.

    Args:
        parts: a glob, a folder, a list, a brace range such as ``"part-{00001..16000}.tar"``.
        order: a ``pg.order``.
        manifest: a :class:`Manifest` or the file that ``pipegraph index`` wrote.
    """

    default_name = "shardselect"
    level = "part"

    def __init__(
        self,
        parts: str | os.PathLike[str] | Sequence[Any],
        order: Order | None = None,
        manifest: Manifest | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(order or LaneOrder())
        self.parts = parts
        self.whole_parts = isinstance(self.order, PartOrder) and manifest is None
        self.random_access = not self.whole_parts
        self.elastic = not self.whole_parts
        self._given = manifest
        self._manifest = _Once(self._find_manifest)
        self._parts = _Once(lambda: expand_parts(self.parts))

    def _find_manifest(self) -> Manifest:
        if isinstance(self._given, Manifest):
            return self._given
        if self._given is not None:
            return Manifest.load(self._given)
        parts = expand_parts(self.parts)
        remote = next((part for part in parts if not part.is_local), None)
        if remote is not None:
            raise GraphError(
                f"ShardSelect: remote parts such as {remote.uri!r} need a manifest: run `pipegraph index PARTS` and pass "
                "manifest=, or use order=pg.order.PartOrder(), which needs none"
            )
        return local_manifest(parts)

    def manifest(self) -> Manifest:
        """The parts with their samples and blocks."""
        found: Manifest = self._manifest.get()
        return found

    def layout(self) -> Any:
        return self.manifest()

    def has_length(self) -> bool:
        return not self.whole_parts

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        if self.whole_parts:
            return len(self._my_parts(epoch, rank, world_size))
        return super().length(epoch, rank, world_size)

    def item(self, index: int) -> ShardSample:
        manifest = self.manifest()
        starts = self._starts(manifest)
        number = int(np.searchsorted(starts, index, side="right")) - 1
        part, block = manifest.block(number)
        return ShardSample(manifest.parts[part], block, index - int(starts[number]))

    def _starts(self, manifest: Manifest) -> Any:
        if self._block_starts is None:
            self._block_starts = np.concatenate([[0], np.cumsum(manifest.block_samples)])
        return self._block_starts

    _block_starts: Any = None

    def _my_parts(self, epoch: int, rank: int, world_size: int) -> list[int]:
        assert isinstance(self.order, PartOrder)
        numbers = self.order.parts(len(self._parts.get()), self.seed, epoch, rank, world_size)
        return [int(number) for number in numbers]

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        parts = self._parts.get()
        for step, number in enumerate(self._my_parts(epoch, rank, world_size)):
            if step >= start:
                yield step * world_size + rank, parts[number]

    def config(self) -> dict[str, Any]:
        if self.whole_parts:
            return {"parts": [part.name for part in self._parts.get()], **self.order.config()}
        return {"manifest": self.manifest().digest, **self.order.config()}


class _OpenParts:
    """Files and block indexes of the shards in use, shared by a stage's workers; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._files: OrderedDict[str, tuple[ShardFile, dict[int, Any]]] = OrderedDict()

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            closing = [] if self._users else [file for file, _ in self._files.values()]
            if closing:
                self._files.clear()
        for file in closing:
            file.close()

    def block(self, part: Part, block: Any) -> Any:
        """The samples of a block, with random access."""
        with self._lock:
            entry = self._files.get(part.uri)
            if entry is not None:
                self._files.move_to_end(part.uri)
                samples = entry[1].get(block.first)
                if samples is not None:
                    return samples
        if entry is None:
            entry = self._keep(part, open_part(part))
        samples = format_of(part).read(entry[0], block)
        with self._lock:
            return entry[1].setdefault(block.first, samples)

    def _keep(self, part: Part, file: ShardFile) -> tuple[ShardFile, dict[int, Any]]:
        with self._lock:
            entry = self._files.get(part.uri)
            if entry is None:
                entry = self._files[part.uri] = (file, {})
                if len(self._files) > OPEN_PARTS:
                    # Not closed here: another worker may be reading it. It closes with its last reader.
                    self._files.popitem(last=False)
                return entry
        file.close()
        return entry


@final
class Load(Operator):
    """Bytes into samples.

    A sample with ``"path"`` comes out with the file's bytes under ``"bytes"``; a sample of a shard with the
    shard's fields (tar: by extension, as bytes; ``cls`` becomes the int ``"label"``; typed formats keep
    their types); a whole shard as its samples, one after the other.
    """

    default_name = "load"
    needs = "sample|part"
    gives = "sample"

    def __init__(self) -> None:
        self._parts = _OpenParts()

    def bind(self, upstream: Sequence[Operator | Source]) -> Operator:
        source = upstream[0]
        if isinstance(source, ShardSelect) and source.whole_parts:
            return LoadParts(source.order)
        return self

    def open(self, context: Context) -> None:
        self._parts.enter()

    def close(self) -> None:
        self._parts.leave()

    def process(self, chunk: Chunk) -> Chunk:
        data = chunk.data
        if isinstance(data, ShardSample):
            sample = dict(self._parts.block(data.part, data.block)[data.index])
            chunk.data = sample
            if "key" in sample:
                chunk.keys = (sample["key"],)
            return chunk
        if not isinstance(data, Mapping) or "path" not in data:
            raise GraphError(
                "Load: a sample with a 'path' or a shard is needed, "
                f"got {'fields ' + ', '.join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__}"
            )
        chunk.keys = chunk.keys
        with open(data["path"], "rb", buffering=0) as file:
            chunk.data = {**data, "bytes": file.readall()}
        return chunk


class LoadParts(Operator):
    """What ``Load`` is behind a ``ShardSelect`` of whole parts: each part's samples in the part's own order."""

    kind = "expand"
    default_name = "load"
    needs = "part"
    gives = "sample"
    one_to_one = False

    def __init__(self, order: Order) -> None:
        self._order = order
        self._context = Context("")

    def config(self) -> dict[str, Any]:
        return self._order.config()

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, chunk: Chunk) -> Iterator[Chunk]:
        part: Part = chunk.data
        form = format_of(part)
        with open_part(part) as file:
            samples: Iterable[tuple[int, Any]]
            if isinstance(self._order, PartOrder) and self._order.shuffle:
                samples = self._permuted(form, file, chunk)
            else:
                samples = enumerate(form.samples(file))
            for index, sample in samples:
                child = chunk.child(index, sample)
                if "key" in sample:
                    child.keys = (sample["key"],)
                yield child

    def _permuted(self, form: Any, file: ShardFile, chunk: Chunk) -> Iterator[tuple[int, Any]]:
        """The part's samples by a permutation keyed by seed, epoch and part."""
        assert isinstance(self._order, PartOrder)
        blocks = list(form.index(file))
        starts = np.concatenate([[0], np.cumsum([block.samples for block in blocks])])
        readers: dict[int, Any] = {}
        places = self._order.within(chunk.rows[0][1], int(starts[-1]), self._context.seed, chunk.epoch)
        for place in places.tolist():
            number = int(np.searchsorted(starts, place, side="right")) - 1
            if number not in readers:
                readers[number] = form.read(file, blocks[number])
            yield place, readers[number][place - int(starts[number])]
