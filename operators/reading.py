"""The block reader of a stage and what it may hold, between ``Load`` and the reader."""

from __future__ import annotations

import threading
from typing import final

from pipegraph.contracts import Context
from pipegraph.errors import MemoryLimitError
from pipegraph.machine import available_memory
from pipegraph.operators.blocks import BlockReader
from pipegraph.operators.near import Near
from pipegraph.operators.shards import Feed, ShardSelect
from pipegraph.operators.shelves import SHARE, BlockShelf, PartShelf, is_decoded
from pipegraph.operators.switches import Switches
from pipegraph.order import LaneOrder, PartOrder
from pipegraph.order.lane_plan import require_memory
from pipegraph.storage import NodeCache


@final
class Reading:
    """The block reader of a stage, shared by its workers: made at the first sample, closed by the last worker."""

    def __init__(self, cache: NodeCache | None, ahead: bool, context: Context) -> None:
        self._cache, self._ahead, self._context = cache, ahead, context
        self._lock = threading.Lock()
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

    def of(self, feed: Feed) -> BlockReader:
        """The reader of what this feed deals."""
        with self._lock:
            if self.reader is None:
                self.reader = self._make(feed)
                feed.subscribe(self.reader)
                if self._cancelled:
                    self.reader.cancel()
            return self.reader

    def _make(self, feed: Feed) -> BlockReader:
        select, context = feed.select, self._context
        memory = memory_of(context)
        near = Near(
            select.store, select.is_remote(), self._cache, blocks_nbytes(select, memory), context.count
        )
        shelf: BlockShelf | PartShelf
        if select.whole_parts:
            assert isinstance(select.order, PartOrder)
            shelf = PartShelf(select.part_list(), select.order.shuffle or self._cache is not None, near)
        else:
            shelf = BlockShelf(
                select.manifest(), select.order, feed.rank, feed.world_size, near, select.pieces()
            )
        return BlockReader(shelf, self._ahead, context.count, context.share("blocks", Switches))

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

    Where a node cache is used, or parts are read in place, nothing is held but what is decoded; what a full cache
    has no room for goes to memory all the same, up to this.
    """
    most = int(memory_limit * SHARE)
    if select.whole_parts:
        sizes = [part.size for part in select.part_list()]
        return most if None in sizes else min(most, sum(size or 0 for size in sizes))
    return min(most, int(select.manifest().block_nbytes.sum()))


def holds_blocks(select: ShardSelect, cache: NodeCache | None) -> bool:
    """Whether blocks are held in memory: remote ones without a cache, and decoded ones."""
    if select.whole_parts:
        assert isinstance(select.order, PartOrder)
        return cache is None and select.is_remote() and select.order.shuffle
    return (cache is None and select.is_remote()) or any(map(is_decoded, select.manifest().parts))


def check_memory(order: LaneOrder, select: ShardSelect, context: Context) -> None:
    """Raise MemoryLimitError, before anything is read, if a rank's blocks cannot be held in memory."""
    manifest, limit = select.manifest(), int(memory_of(context) * SHARE)
    if not select.is_remote() or int(manifest.block_nbytes.sum()) <= limit:
        return
    try:
        require_memory(order, manifest, context.world_size, int(manifest.block_nbytes.max()), limit)
    except MemoryLimitError as error:
        error.add_note(
            f"pipegraph: blocks in memory may take {SHARE:.0%} of the loader's memory_limit; "
            "with Load(cache=pg.NodeCache(...)) they lie on disk instead"
        )
        raise
