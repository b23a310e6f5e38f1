"""A store client and a node cache handle of one reader, closed together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from pipegraph import concurrency
from pipegraph.errors import LoaderClosedError, StoreError
from pipegraph.storage import Cacheable, LocalFile, NodeCache, StoreClient
from pipegraph.storage.entries import Download, Sink
from pipegraph.storage.open_blocks import BlockCache
from pipegraph.storage.space import NO_ROOM

_log = logging.getLogger("pipegraph.cache")


COUNTERS: Final = {
    "requests": "store requests",
    "retried": "store requests tried again",
    "stalled": "store requests that stalled",
    "hedged": "store requests asked twice",
}
"""What the store's client counts, as counters of the stage."""


class Destination(Enum):
    """Where fetched blocks go."""

    MEMORY = 1
    CACHE = 2
    FULL = 3  # the cache, which had no room for the last block: it went to memory


class Fetcher:
    """Fetches blocks for one reader; closing it ends only that reader's waits."""

    def __init__(
        self,
        store: dict[str, Any] | None,
        remote: bool,
        cache: NodeCache | None,
        memory: int,
        count: Callable[[str, int], None],
    ) -> None:
        self.store = StoreClient(store, on_count=self._on_count) if remote else None
        self.handle = None if cache is None else NodeCache(cache.folder, cache.limit)
        self.in_use = remote or cache is not None
        self.memory = max(1, memory)
        self._count = count
        self._stopped = concurrency.Event()
        self._destination = Destination.MEMORY if cache is None else Destination.CACHE

    @property
    def cache(self) -> BlockCache | None:
        """The cache to load through: this object, which counts and interrupts each `fetch`."""
        return None if self.handle is None else self

    @property
    def in_memory(self) -> bool:
        """Whether fetched blocks lie in memory, not on disk."""
        return self._destination is not Destination.CACHE

    def budget(self) -> int:
        """Bytes for blocks: this rank's share of the cache, else of memory."""
        if self.handle is None or self.in_memory:
            return self.memory
        return max(1, self.handle.limit // local_ranks()[1])

    def fetch(self, what: Cacheable, download: Download) -> LocalFile:
        """As `NodeCache.fetch`, counted, and ended by `interrupt` also while it copies from a slow disk."""
        assert self.handle is not None
        downloaded = False

        def run(sink: Sink) -> None:
            nonlocal downloaded
            downloaded = True
            download(_Stoppable(sink, self._stopped))

        try:
            file = self.handle.fetch(what, run)
        except StoreError:
            raise
        except OSError as error:  # no room, or the folder is gone: the block is read into memory
            if error.errno not in NO_ROOM and self._destination is Destination.CACHE:
                _log.warning("the node cache cannot be used, blocks are read into memory: %s", error)
            self._destination = Destination.FULL
            self._count("blocks without room in the cache", 1)
            raise
        self._destination = Destination.CACHE
        self._count("cache misses" if downloaded else "cache hits", 1)
        return file

    def _on_count(self, name: str, more: int) -> None:
        if name in COUNTERS:
            self._count(COUNTERS[name], more)

    def interrupt(self) -> None:
        """End every wait and every transfer."""
        self._stopped.set()
        if self.handle is not None:
            self.handle.close()
        if self.store is not None:
            self.store.close()

    close = interrupt


class _Stoppable:
    def __init__(self, sink: Sink, stopped: concurrency.Event) -> None:
        self._sink, self._stopped = sink, stopped

    def write_at(self, offset: int, data: bytes) -> None:
        if self._stopped.is_set():
            raise LoaderClosedError("the pipeline was closed while a block was copied")
        self._sink.write_at(offset, data)


def local_ranks() -> tuple[int, int]:
    """(local rank, ranks on this node), as torchrun sets them; without it this process counts as alone."""
    try:
        return int(os.environ.get("LOCAL_RANK", "0")), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 0, 1
