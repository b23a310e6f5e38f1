"""A store client and a node cache handle of one reader, closed together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from pipegraph.errors import StoreError
from pipegraph.storage import NodeCache
from pipegraph.storage.entries import Cacheable, Download, Sink
from pipegraph.storage.open_blocks import BlockCache
from pipegraph.storage.shard_files import LocalFile
from pipegraph.storage.space import NO_ROOM
from pipegraph.storage.stores import StoreClient

_log = logging.getLogger("pipegraph.cache")


COUNTERS: Final = {
    "requests": "store requests",
    "retried": "store requests tried again",
    "stalled": "store requests that stalled",
}
"""What the store's client counts, as counters of the stage."""


class Fetcher:
    """Fetches blocks for one reader; closing it ends only that reader's waits.

    Attributes:
        in_memory: whether fetched blocks lie in memory: without a cache, and from where it has no room on.
    """

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
        self.in_memory = cache is None

    @property
    def cache(self) -> BlockCache | None:
        """The cache to load through: this object, which counts and interrupts each `fetch`."""
        return None if self.handle is None else self

    def budget(self) -> int:
        """Bytes for blocks: this rank's share of the cache, else of memory."""
        if self.handle is None or self.in_memory:
            return self.memory
        return max(1, self.handle.limit // local_ranks()[1])

    def fetch(self, what: Cacheable, download: Download) -> LocalFile:
        """As `NodeCache.fetch`, counted."""
        assert self.handle is not None
        downloaded = False

        def run(sink: Sink) -> None:
            nonlocal downloaded
            downloaded = True
            download(sink)

        try:
            file = self.handle.fetch(what, run)
        except StoreError:
            raise
        except OSError as error:  # no room, or the folder is gone: the block is read into memory
            if error.errno not in NO_ROOM and not self.in_memory:
                _log.warning("the node cache cannot be used, blocks are read into memory: %s", error)
            self.in_memory = True
            self._count("blocks without room in the cache", 1)
            raise
        self._count("cache misses" if downloaded else "cache hits", 1)
        return file

    def _on_count(self, name: str, more: int) -> None:
        if name in COUNTERS:
            self._count(COUNTERS[name], more)

    def interrupt(self) -> None:
        """End every wait and every transfer."""
        if self.handle is not None:
            self.handle.close()
        if self.store is not None:
            self.store.close()

    close = interrupt


def local_ranks() -> tuple[int, int]:
    """(local rank, ranks on this node), as torchrun sets them; without it this process counts as alone."""
    try:
        return int(os.environ.get("LOCAL_RANK", "0")), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 0, 1
