"""Samples from files and shards: ``Load``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Source, Traits
from pipegraph.errors import GraphError, shown
from pipegraph.integers import flag
from pipegraph.operators.shared_reader import (
    Reading,
    ShardFeed,
    ShardSample,
    ShardSamples,
    blocks_nbytes,
    check_memory,
    holds_blocks,
)
from pipegraph.storage.shard_files import read_file

if TYPE_CHECKING:
    from pipegraph.columns import Columns, EncodedRows
    from pipegraph.operators.shards import ShardSelect
    from pipegraph.reader.block_reader import BlockReader
    from pipegraph.storage import NodeCache


class _Reads(Operator):
    """What the two forms of ``Load`` share: the stage's reader and its life."""

    name = "load"
    depends_on = "item"
    _select: ShardSelect | None = None

    def __init__(self, cache: NodeCache | None, preload: bool, chosen: Sequence[str] | None) -> None:
        self.cache, self.preload, self.chosen = cache, preload, chosen
        self._context = Context("")
        self._reading: Reading | None = None

    def config(self) -> dict[str, Any]:
        # Where bytes lie on their way does not change what is delivered.
        return {} if self.chosen is None else {"columns": list(self.chosen)}

    @property
    def traits(self) -> Traits:
        # The blocks of shards are shared by the stage's workers.
        return Traits(seeds_itself=True, in_trainer=self._select is not None, holds=self._holds)

    def _holds(self, memory_limit: int) -> int:
        if self._select is None or not holds_blocks(self._select, self.cache):
            return 0
        return blocks_nbytes(self._select, memory_limit)

    def open(self, context: Context) -> None:
        if self._select is not None and not self._select.whole_parts:
            self._select.find(context.stopping)  # whole parts are listed by their own stage, which fails then
        self._context = context
        self._reading = context.share(
            "reading", lambda: Reading(self.cache, self.preload, self.chosen, context)
        )
        self._reading.enter()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.leave()

    def cancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel(True)

    def uncancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel(False)

    def _reader(self, feed: ShardFeed) -> BlockReader:
        assert self._reading is not None
        return self._reading.reader or self._reading.of(feed)


def chosen_columns(columns: Any, operator: str) -> tuple[str, ...] | None:
    """The names of ``columns=``; None where it is."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise GraphError(
            f"{operator}: columns must be a list of names, got {shown(columns)}: write columns=[{columns!r}]"
        )
    # A set of texts has another order in each process, and the order is a part of states.
    given = sorted(columns) if isinstance(columns, Set) else columns
    names = tuple(given) if isinstance(given, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise GraphError(f"{operator}: columns must be a list of at least one name, got {shown(columns)}")
    return names


@final
class Load(_Reads):
    """Reads the bytes of files, and the samples of shards.

    - A sample with ``"path"`` gets the file's bytes as its field ``"bytes"``.
    - A sample of a shard gets the shard's fields. In a tar shard, a field's name is the file extension, and its value
      is bytes; ``cls`` becomes the int ``"label"``. Typed formats keep their types.
    - A whole shard becomes its samples, one after the other.

    Local shards are read in place. Remote shards are fetched block by block, ahead of its first use: into
    the cache as long as it has room, else into memory. Blocks in memory take at most half of ``memory_limit``.

    Args:
        cache: a ``pg.NodeCache``, shared by all ranks of a node. With a cache, local shards are copied to it too,
            because their storage is assumed to be slow. The loader opens its own handle on the cache's folder.
        preload: whether blocks are fetched before they are needed.
        columns: for shards with columns (Parquet): read only these columns. Nulls of floats are NaN; other nulls are
            None, which ``Batch`` refuses.

    Raises:
        GraphError: while it runs: an item is neither a sample with a ``"path"`` nor from a shard.
        OSError: while it runs: a file cannot be read, such as ``FileNotFoundError``.
        DataError: while it runs: a path is not a regular file, or a shard is damaged or was changed.
    """

    needs = "sample|part"
    gives = "sample"

    def __init__(
        self,
        cache: NodeCache | None = None,
        preload: bool = True,
        columns: Sequence[str] | None = None,
    ) -> None:
        if cache is not None:
            from pipegraph.storage import NodeCache

            if not isinstance(cache, NodeCache):
                raise GraphError(f"Load: cache must be a pg.NodeCache(folder, limit), got {shown(cache)}")
        super().__init__(cache, flag(preload, "Load: preload"), chosen_columns(columns, "Load"))

    @property
    def traits(self) -> Traits:
        below_shards = self._select is not None
        own = replace(super().traits, blocks=True, columns=True, encoded=True, unpacks=below_shards)
        return replace(own, bind=self._bound, notes=self._notes)

    def _bound(self, upstream: Sequence[Operator | Source]) -> Operator:
        source = _shards(upstream[0])
        if source is None:
            return self
        if source.whole_parts:
            return LoadParts(source, self.cache, self.preload, self.chosen)
        bound = copy.copy(self)
        bound._select = source
        return bound

    @property
    def reads_files(self) -> bool:
        """Whether its samples are files, and not parts of shards."""
        return self._select is None

    def _notes(self) -> list[str]:
        select = self._select
        if select is None:
            return []
        from pipegraph.loader.options import resolve
        from pipegraph.order import LaneOrder

        manifest = select.known_manifest()
        if not isinstance(select.order, LaneOrder) or manifest is None or not manifest.blocks:
            return []
        _, world_size = resolve(None, None)
        largest = int(manifest.block_nbytes.max())
        text = select.order.cost(manifest, world_size, largest)
        if self.cache is not None:
            return [f"{text}; in the node cache"]
        if holds_blocks(select, None):
            return [f"{text}; in memory" + ("" if select.is_remote() else ", decoded")]
        return [f"{text}; read in place, nothing is held"]

    def open(self, context: Context) -> None:
        select = self._select
        if select is not None:
            from pipegraph.order import LaneOrder

            if isinstance(select.order, LaneOrder):
                select.find(context.stopping)
                check_memory(select.order, select, self.cache, context)
        super().open(context)

    def process(self, chunk: Chunk) -> Chunk:
        data = chunk.data
        if data.__class__ is ShardSample:
            sample = self._reader(data.feed).sample(data.number, data.index, chunk.epoch, chunk.before)
            chunk.data = sample
            if "key" in sample:
                chunk.keys = (sample["key"],)
            return chunk
        chunk.keys = chunk.own_keys
        chunk.data = _with_bytes(data)
        return chunk

    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        if bundle.packed is None and bundle.data[start].__class__ is not ShardSample:
            made.extend(map(_with_bytes, islice(bundle.data, start, None)))
            return
        given, epoch, steps = ShardSamples.of(bundle), bundle.epoch, bundle.steps()
        reader, numbers, indices = self._reader(given.feed), given.numbers.tolist(), given.indices.tolist()
        rows = range(start, bundle.count)
        made.extend(reader.sample(numbers[row], indices[row], epoch, steps[row]) for row in rows)

    def columns(self, bundle: Bundle) -> Columns | None:
        from pipegraph.storage.formats import format_of

        if self._select is None or not format_of(self._select.manifest().parts[0]).columnar:
            return None
        found: Columns | None = self._together("columns", bundle)
        return found

    def encoded(self, bundle: Bundle) -> EncodedRows | None:
        found: EncodedRows | None = None if self._select is None else self._together("encoded", bundle)
        return found

    def _together(self, form: str, bundle: Bundle) -> Any:
        given = ShardSamples.of(bundle)
        reader = self._reader(given.feed)
        return reader.together(form, given.numbers, given.indices, bundle.epoch, bundle.steps())


def _shards(source: Operator | Source) -> ShardSelect | None:
    """The source, if it is a ``ShardSelect``, which only those of parts can be: others need none of its modules."""
    if source.gives != "part":
        return None
    from pipegraph.operators.shards import ShardSelect

    return source if isinstance(source, ShardSelect) else None


def no_path(sample: Any) -> GraphError:
    """The error for what is neither a sample of a file nor a shard."""
    given = f"fields {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
    return GraphError(f"Load: a sample with a 'path' or a shard is needed, got {given}")


def _with_bytes(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, Mapping) or "path" not in sample:
        raise no_path(sample)
    return {**sample, "bytes": read_file(sample["path"])}


class LoadParts(_Reads):
    """What ``Load`` is behind a ``ShardSelect`` of whole parts: each part's samples in the part's own order.

    Where samples are shuffled inside the part, a remote part is fetched whole, the next one while this one
    is read; else it is read as a stream.
    """

    kind = "expand"
    needs = "part"
    gives = "sample"
    one_to_one = False

    def __init__(
        self, select: ShardSelect, cache: NodeCache | None, preload: bool, chosen: Sequence[str] | None
    ) -> None:
        super().__init__(cache, preload, chosen)
        from pipegraph.order import PartOrder

        assert isinstance(select.order, PartOrder)
        self._select, self._order = select, select.order

    def config(self) -> dict[str, Any]:
        return {**self._order.config(), **super().config()}

    def process(self, chunk: Chunk) -> Iterator[Chunk]:
        given: ShardSample = chunk.data
        reader = self._reader(given.feed)
        entry = reader.acquire(given.number, chunk.epoch, chunk.before)
        try:
            for index, sample in self._samples(entry.value, given.number, chunk.epoch):
                child = chunk.child(index, sample)
                if "key" in sample:
                    child.keys = (sample["key"],)
                yield child
        finally:
            reader.release(entry)

    def _samples(self, found: Any, part: int, epoch: int) -> Iterator[tuple[int, Any]]:
        """Samples with their places: of a stream as they come, else permuted by seed, epoch and part."""
        if callable(found):
            yield from enumerate(found())
            return
        places = self._order.within(part, len(found), self._context.seed, epoch)
        for start in range(0, len(places), found.at_once):
            some = places[start : start + found.at_once]
            yield from zip(some.tolist(), found.rows(some), strict=True)
