"""Where a stage's blocks come from: the blocks of a manifest, or whole parts; from place, memory or the node cache."""

from __future__ import annotations

import errno
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, cast, final

import numpy as np

from pipegraph.errors import GraphError, LoaderClosedError
from pipegraph.operators.lookahead import NEVER, Deal, first_positions
from pipegraph.order import LaneOrder, Order
from pipegraph.order.lanes import LanedEpoch
from pipegraph.order.layout import Int64Array
from pipegraph.storage import (
    Cacheable,
    CachedFile,
    Manifest,
    NodeCache,
    Part,
    ShardFile,
    StoreClient,
    open_block,
    open_part,
)
from pipegraph.storage.cache import Download, Sink
from pipegraph.storage.formats import Block, TokenFormat, format_of
from pipegraph.storage.formats.arrays import NpyFormat
from pipegraph.storage.formats.tar import TarFormat

IN_PLACE: Final = (TarFormat, NpyFormat, TokenFormat)
"""Formats whose samples are read from the file one by one; of others a block's decoded form is held in memory."""

SHARE: Final = 0.5
"""Of ``memory_limit``, what blocks held in memory may take; chunks in flight have the whole of it beside them."""

MOST_NAMES: Final = 65_536
"""Blocks up to which each one's name in the node cache is computed, so that the plan knows entries of earlier runs."""


class Shelf(ABC):
    """Blocks by number.

    Attributes:
        near: whether blocks are brought near (from a store, or through a cache), or read in place.
        keeps: whether what is let go of stays near, in the node cache.
        stride: steps over which consumption is measured.
        steps_per_switch: about how many steps lie between the first uses of two blocks.
    """

    near: bool
    keeps: bool = False
    stride: int
    steps_per_switch: float

    @abstractmethod
    def held_nbytes(self, number: int) -> int:
        """What a block counts of the budget; an estimate until it is open."""

    @abstractmethod
    def budget(self) -> int:
        """Bytes that all blocks together should not exceed."""

    @abstractmethod
    def open(self, number: int) -> tuple[ShardFile, Any]:
        """A block's file, and what is read from it. Blocks until it is near; `interrupt` ends that.

        Raises:
            LoaderClosedError: `interrupt` was called.
        """

    def follow(self, deal: Deal, step: int) -> None:  # noqa: B027
        """Training is near this step of an epoch; called now and then, by one thread."""

    @abstractmethod
    def interrupt(self) -> None:
        """End every `open` that waits, and those to come."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; no file is open any more."""


@final
class Near:
    """A store client and a handle on a node cache of one reader's own, so that closing them ends its waits only."""

    def __init__(
        self,
        store: dict[str, Any] | None,
        remote: bool,
        cache: NodeCache | None,
        memory_limit: int,
        count: Callable[[str, int], None],
    ) -> None:
        self.store = StoreClient(store) if remote else None
        self._cache = None if cache is None else NodeCache(cache.folder, cache.limit)
        self.in_use = remote or cache is not None
        self._memory = max(1, int(memory_limit * SHARE))
        self._count = count
        self._stopped = threading.Event()
        self._spills = False

    @property
    def cache(self) -> NodeCache | None:
        """The cache to load through: itself, in the way `fetch` is used."""
        return None if self._cache is None else cast(NodeCache, self)

    @property
    def handle(self) -> NodeCache | None:
        """This reader's handle on the node cache."""
        return self._cache

    def budget(self) -> int:
        """Bytes for blocks: this rank's share of the cache, else of memory."""
        if self._cache is None or self._spills:
            return self._memory
        return max(1, self._cache.limit // local_ranks()[1])

    def fetch(self, what: Cacheable, download: Download) -> CachedFile:
        """As `NodeCache.fetch`, counted, and ended by `interrupt` also while it copies from a slow disk."""
        assert self._cache is not None
        downloaded = False

        def run(sink: Sink) -> None:
            nonlocal downloaded
            downloaded = True
            download(_Stoppable(sink, self._stopped))

        try:
            file = self._cache.fetch(what, run)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                self._spills = True
                self._count("blocks without room in the cache", 1)
            raise
        self._spills = False
        self._count("cache misses" if downloaded else "cache hits", 1)
        return file

    def interrupt(self) -> None:
        """End every wait and every transfer."""
        self._stopped.set()
        if self._cache is not None:
            self._cache.close()
        if self.store is not None:
            self.store.close()

    def close(self) -> None:
        """The same: both are closed by it."""
        self.interrupt()


class _Stoppable:
    def __init__(self, sink: Sink, stopped: threading.Event) -> None:
        self._sink, self._stopped = sink, stopped

    def write_at(self, offset: int, data: bytes) -> None:
        if self._stopped.is_set():
            raise LoaderClosedError("the pipeline was closed while a block was copied")
        self._sink.write_at(offset, data)


@final
class BlockShelf(Shelf):
    """The blocks of a manifest; what is read from one is the sequence of its samples."""

    stride = 256

    def __init__(self, manifest: Manifest, order: Order, rank: int, world_size: int, near: Near) -> None:
        self._manifest, self._order, self._near = manifest, order, near
        self._rank, self._world_size = rank, world_size
        self.near, self.keeps = near.in_use, near.handle is not None
        readers = 1  # ranks that read the same block
        if isinstance(order, LaneOrder) and order.shuffle:
            readers = world_size // math.gcd(order.lane_count(manifest), world_size)
        self.steps_per_switch = max(1.0, len(manifest) / max(1, manifest.blocks) / readers)
        self._plan: _NextUses | None = None
        self._names: dict[str, int] | None = None

    def held_nbytes(self, number: int) -> int:
        if self.near:
            return int(self._manifest.block_nbytes[number])
        part, _ = self._manifest.block(number)
        in_place = isinstance(format_of(self._manifest.parts[part]), IN_PLACE)
        return 0 if in_place else int(self._manifest.block_nbytes[number])

    def budget(self) -> int:
        return self._near.budget()

    def open(self, number: int) -> tuple[ShardFile, Any]:
        part_number, block = self._manifest.block(number)
        part = self._manifest.parts[part_number]
        file = open_block(
            part,
            block,
            crc32c=self._manifest.block_checksum(number),
            store=self._near.store,
            cache=self._near.cache,
        )
        try:
            return file, format_of(part).read(file, block)
        except BaseException:
            file.close()
            raise

    def follow(self, deal: Deal, step: int) -> None:
        """Give the cache the uses that the order foresees, of this epoch and the next."""
        handle = self._near.handle
        if handle is None or not isinstance(self._order, LaneOrder) or not self._order.shuffle:
            return
        if self._names is None:
            few = self._manifest.blocks <= MOST_NAMES
            self._names = (
                {self._name(number): number for number in range(self._manifest.blocks)} if few else {}
            )
        if self._plan is None or self._plan.epoch != deal.epoch:
            count = self._order.lane_count(self._manifest)
            lanes = node_lanes(count, self._rank, self._world_size)
            now, then = (
                first_positions(
                    LanedEpoch.of(self._manifest.block_samples, count, self._order.window, deal.seed, epoch),
                    lanes,
                )
                for epoch in (deal.epoch, deal.epoch + 1)
            )
            self._plan = _NextUses(deal.epoch, self._names, now, then, len(self._manifest))
            handle.plan(self._plan.next_use)
        self._plan.advance(deal.position(step))

    def _name(self, number: int) -> str:
        part_number, block = self._manifest.block(number)
        part = self._manifest.parts[part_number]
        return Cacheable(
            part.uri, block.nbytes, block.offset, part.size, None, self._manifest.block_checksum(number)
        ).name

    def interrupt(self) -> None:
        self._near.interrupt()

    def close(self) -> None:
        self._near.close()


class _NextUses:
    """Positions until the next use of cache entries, of this epoch or the one behind it."""

    def __init__(
        self, epoch: int, names: dict[str, int], now: Int64Array, then: Int64Array, samples: int
    ) -> None:
        self.epoch = epoch
        self._names, self._now, self._then, self._samples = names, now, then, samples
        self._position = 0

    def advance(self, position: int) -> None:
        """Training is at a global position of the epoch."""
        self._position = position

    def next_use(self, name: str) -> float:
        """Positions until the use; infinite for what is not of this data set or not of this node's ranks."""
        number = self._names.get(name)
        if number is None:
            return float("inf")
        if self._position <= self._now[number] < NEVER:
            return float(self._now[number] - self._position)
        if self._then[number] < NEVER:
            return float(self._samples - self._position + self._then[number])
        return float("inf")


@final
class PartShelf(Shelf):
    """Whole parts, by their place in the list of parts; only their files are of interest."""

    stride = 1
    steps_per_switch = 1.0

    def __init__(self, parts: list[Part], whole: bool, near: Near) -> None:
        self._parts, self._near, self._whole = parts, near, whole
        self.near = near.in_use and whole
        self._sizes: dict[int, int] = {}  # of parts whose size was asked for

    def held_nbytes(self, number: int) -> int:
        if not self.near:
            return 0
        size = self._parts[number].size or self._sizes.get(number)
        # As large as the largest one known, until it is asked for.
        return size if size is not None else max(list(self._sizes.values()), default=0)

    def budget(self) -> int:
        return self._near.budget()

    def open(self, number: int) -> tuple[ShardFile, Any]:
        part, store = self._parts[number], self._near.store
        if not self.near:
            return open_part(part, store), None
        if part.size is None:
            assert store is not None
            part = Part(part.uri, store.head(part.uri).size)
            self._sizes[number] = part.size or 0
        assert part.size is not None
        if self._near.handle is None and part.size > self._near.budget():
            raise GraphError(
                f"part {part.name!r} has {part.size} bytes, more than this rank may hold in memory "
                f"({self._near.budget()}): give Load(cache=pg.NodeCache(...)), use PartOrder(shuffle=False), which "
                "reads parts as streams, or a manifest, with which parts are read in blocks"
            )
        block = Block(0, part.size, 0, 0)
        return open_block(part, block, store=store, cache=self._near.cache), None

    def interrupt(self) -> None:
        self._near.interrupt()

    def close(self) -> None:
        self._near.close()


def local_ranks() -> tuple[int, int]:
    """(local rank, ranks on this node), as torchrun tells; without it this process counts as alone."""
    try:
        return int(os.environ.get("LOCAL_RANK", "0")), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 0, 1


def node_lanes(lanes: int, rank: int, world_size: int) -> Int64Array:
    """The lanes that the ranks of this node read, int64; all of them where every rank may be on it."""
    local, ranks = local_ranks()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        local, ranks = rank, world_size
    first = max(0, rank - local)
    shared = int(np.gcd(lanes, world_size))
    read = np.unique(np.arange(first, min(world_size, first + ranks)) % shared)
    lane = np.arange(lanes, dtype=np.int64)
    return lane[np.isin(lane % shared, read)]
