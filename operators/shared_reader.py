"""What a ``ShardSelect`` hands to ``Load``, and the block reader that the workers of a Load share.

A sample or whole part refers to the feed that it comes from, which tells the reader what is read next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, final

import numpy as np

from pipegraph import concurrency
from pipegraph.contracts import Context
from pipegraph.errors import MemoryLimitError
from pipegraph.machine import available_memory
from pipegraph.reader.schedule import SHARE

if TYPE_CHECKING:
    from pipegraph.bundle import Bundle
    from pipegraph.operators.shards import ShardSelect
    from pipegraph.order import LaneOrder
    from pipegraph.order.layout import Int64Array
    from pipegraph.reader.block_reader import BlockReader
    from pipegraph.reader.schedule import RankSteps
    from pipegraph.storage import NodeCache


COUNTERS: Final = {
    "requests": "store requests",
    "retried": "store requests tried again",
    "stalled": "store requests that stalled",
    "hits": "cache hits",
    "misses": "cache misses",
}
"""What the store's client and the cache count, as counters of the stage."""


class ShardFeed:
    """What one loader's ``ShardSelect`` deals, epoch by epoch. It travels with the samples to their ``Load``.

    Thread-safe.
    """

    def __init__(self, select: ShardSelect, context: Context) -> None:
        self.select = select
        self.world_size = context.world_size
        self._lock = concurrency.Lock()
        self._deals: list[RankSteps] = []
        self._listeners: list[BlockReader] = []

    def deal(self, deal: RankSteps, new_run: bool) -> None:
        """The steps of another epoch begin to be dealt. In a ``new_run`` those dealt before do not hold any more."""
        with self._lock:
            self._deals = [deal] if new_run else [*self._deals[-1:], deal]
            for listener in self._listeners:
                if new_run:
                    listener.new_run()
                listener.dealt(deal)

    def subscribe(self, listener: BlockReader) -> None:
        """Notify this one too, at once of what is being dealt."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)
                for deal in self._deals:
                    listener.dealt(deal)


class ShardSample:
    """Sample ``index`` of block ``number``, or a whole part of that number; ``Load`` reads it."""

    __slots__ = ("feed", "index", "number")

    def __init__(self, feed: ShardFeed, number: int, index: int = 0) -> None:
        self.feed = feed
        self.number = number
        self.index = index


class ShardSamples:
    """Several ``ShardSample``s: in place of these where ``Load`` comes next, which makes none of them.

    Attributes:
        numbers, indices: int64 (samples,).
    """

    __slots__ = ("feed", "indices", "numbers")
    kind = None

    def __init__(self, feed: ShardFeed, numbers: Int64Array, indices: Int64Array) -> None:
        self.feed, self.numbers, self.indices = feed, numbers, indices

    @staticmethod
    def of(bundle: Bundle) -> ShardSamples:
        """Those of a bundle."""
        if isinstance(bundle.packed, ShardSamples):
            return bundle.packed
        given: Sequence[ShardSample] = bundle.data
        numbers = np.array([each.number for each in given])
        return ShardSamples(given[0].feed, numbers, np.array([each.index for each in given]))

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, start: int, stop: int) -> ShardSamples:
        """Samples ``start`` to ``stop``."""
        return ShardSamples(self.feed, self.numbers[start:stop], self.indices[start:stop])

    def rows(self) -> list[ShardSample]:
        """The samples."""
        feed, indices = self.feed, self.indices.tolist()
        return [ShardSample(feed, *found) for found in zip(self.numbers.tolist(), indices, strict=True)]

    def buffers(self) -> tuple[()]:
        """None that count."""
        return ()


@final
class Reading:
    """The block reader of a stage, shared by its workers: made at the first sample, closed by the last worker."""

    def __init__(
        self, cache: NodeCache | None, ahead: bool, columns: Sequence[str] | None, context: Context
    ) -> None:
        self._cache, self._ahead, self._columns, self._context = cache, ahead, columns, context
        self._lock = concurrency.Lock()
        self._users = 0
        self._cancelled = False
        self.reader: BlockReader | None = None

    def enter(self) -> None:
        """A worker opens."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """A worker closes; the last one closes the reader."""
        with self._lock:
            self._users -= 1
            reader = None
            if not self._users:
                reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def of(self, feed: ShardFeed) -> BlockReader:
        """The reader of what this feed deals."""
        with self._lock:
            if self.reader is None:
                self.reader = self._make(feed)
                feed.subscribe(self.reader)
                if self._cancelled:
                    self.reader.cancel()
            return self.reader

    def _make(self, feed: ShardFeed) -> BlockReader:
        from pipegraph.order import PartOrder
        from pipegraph.reader.block_reader import BlockReader
        from pipegraph.reader.block_sources import ManifestSource, PartSource
        from pipegraph.storage import NodeCache
        from pipegraph.storage.block_bytes import BlockBytes
        from pipegraph.storage.stores import StoreClient

        select, context = feed.select, self._context
        memory = blocks_nbytes(select, memory_of(context))
        store = StoreClient(select.store, on_count=self._on_count) if select.is_remote() else None
        # A handle of its own: closing it ends this reader's waits only.
        cache = self._cache and NodeCache(self._cache.folder, self._cache.limit, self._on_count)
        found = BlockBytes(store, cache, memory, context.count)
        parts = select.part_list() if select.whole_parts else select.manifest().parts
        source: ManifestSource | PartSource
        if select.whole_parts:
            assert isinstance(select.order, PartOrder)
            source = PartSource(parts, not select.order.shuffle, found, self._columns)
        else:
            source = ManifestSource(select.manifest(), found, self._columns)
        return BlockReader(source, self._ahead, context.count)

    def _on_count(self, name: str, more: int) -> None:
        if name in COUNTERS:
            self._context.count(COUNTERS[name], more)

    def cancel(self, cancelled: bool) -> None:
        """End the waits of workers, or allow them again."""
        with self._lock:
            self._cancelled = cancelled
            if self.reader is not None:
                (self.reader.cancel if cancelled else self.reader.uncancel)()


def memory_of(context: Context) -> int:
    """The loader's ``memory_limit``."""
    return context.memory_limit or max(1, available_memory() // 2)


def blocks_nbytes(select: ShardSelect, memory_limit: int) -> int:
    """Bytes of ``memory_limit`` that blocks held in memory may take: half of it, less if there is less data.

    Where all data fits a node cache, or parts are read in place, nothing is held but what is
    decoded. How large decoded blocks are is known once they are read.
    """
    limit = int(memory_limit * SHARE)
    return limit if _decodes(select) else int(min(limit, data_nbytes(select)))


def data_nbytes(select: ShardSelect) -> float:
    """Bytes of all blocks, or of all parts; infinite if those are not known."""
    if select.whole_parts:
        return sum(math.inf if part.size is None else part.size for part in select.part_list())
    return int(select.manifest().block_nbytes.sum())


def _decodes(select: ShardSelect) -> bool:
    from pipegraph.reader.block_sources import is_decoded

    return any(map(is_decoded, select.part_list() if select.whole_parts else select.manifest().parts))


def holds_blocks(select: ShardSelect, cache: NodeCache | None) -> bool:
    """Whether blocks are held in memory: decoded ones, and fetched ones without a cache that has room for all."""
    if select.whole_parts:
        from pipegraph.order import PartOrder

        assert isinstance(select.order, PartOrder)
        if not select.order.shuffle:
            return False  # parts are read as streams
    return _fetched_to_memory(select, cache) or _decodes(select)


def _fetched_to_memory(select: ShardSelect, cache: NodeCache | None) -> bool:
    return select.is_remote() if cache is None else cache.limit < data_nbytes(select) < math.inf


def check_memory(order: LaneOrder, select: ShardSelect, cache: NodeCache | None, context: Context) -> None:
    """Raise MemoryLimitError, before anything is read, if a rank's fetched blocks cannot be held in memory."""
    manifest, limit = select.manifest(), int(memory_of(context) * SHARE)
    if manifest.block_nbytes.sum() <= limit or not _fetched_to_memory(select, cache):
        return
    try:
        order.require_memory(manifest, context.world_size, int(manifest.block_nbytes.max()), limit)
    except MemoryLimitError as error:
        error.add_note(
            f"pipegraph: blocks in memory may take {SHARE:.0%} of the loader's memory_limit; "
            "in a pg.NodeCache with room for all of them they lie on disk instead"
        )
        raise
