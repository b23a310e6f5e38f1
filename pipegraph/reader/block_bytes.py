"""The bytes of a reader's blocks: read in place, or fetched through the node cache or into memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from pipegraph.storage import NodeCache, Part, ShardFile
from pipegraph.storage.formats import Block
from pipegraph.storage.local import LocalParts
from pipegraph.storage.object_file import open_part
from pipegraph.storage.open_blocks import open_block
from pipegraph.storage.space import NO_ROOM
from pipegraph.storage.stores import StoreClient

_log = logging.getLogger("pipegraph.cache")

COUNTERS: Final = {
    "requests": "store requests",
    "retried": "store requests tried again",
    "stalled": "store requests that stalled",
    "hits": "cache hits",
    "misses": "cache misses",
}
"""What the store's client and the cache count, as counters of the stage."""


class Bytes:
    """The bytes of one reader's blocks; closing it ends only that reader's waits.

    Attributes:
        fetched: whether blocks are fetched, from a store or to a cache.
        in_memory: whether fetched blocks lie in memory: without a cache, and from where it has no room on.
        memory: bytes of memory that blocks may take.
    """

    def __init__(
        self,
        store: dict[str, Any] | None,
        remote: bool,
        cache: NodeCache | None,
        memory: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._count = count
        self.store = StoreClient(store, on_count=self._on_count) if remote else None
        self.cache = None if cache is None else NodeCache(cache.folder, cache.limit, self._on_count)
        self._local = LocalParts()
        self.fetched, self.in_memory = remote or cache is not None, cache is None
        self.memory = max(1, memory)

    def budget(self) -> int:
        """Bytes for blocks: this rank's share of the cache, else of memory."""
        if self.cache is None or self.in_memory:
            return self.memory
        return max(1, self.cache.limit // local_ranks()[1])

    def identified(self, part: Part) -> Part:
        """The part with its size."""
        if part.size is not None:
            return part
        assert self.store is not None
        return self.store.identify(part)

    def open(self, part: Part, block: Block, crc32c: int | None = None) -> ShardFile:
        """As `open_block`."""
        return open_block(
            part,
            block,
            crc32c=crc32c,
            store=self.store,
            cache=self.cache,
            local=self._local,
            no_room=self._no_room,
        )

    def stream(self, part: Part) -> ShardFile:
        """A part to be read once, from its start to its end."""
        return self._local.open(part) if part.is_local else open_part(part, self.store)

    def _no_room(self, error: OSError) -> None:
        if error.errno not in NO_ROOM and not self.in_memory:
            _log.warning("the node cache cannot be used, blocks are read into memory: %s", error)
        self.in_memory = True
        self._count("blocks without room in the cache", 1)

    def _on_count(self, name: str, more: int) -> None:
        if name in COUNTERS:
            self._count(COUNTERS[name], more)

    def close(self) -> None:
        """End every wait and every transfer. Idempotent."""
        for each in (self.cache, self.store):
            if each is not None:
                each.close()


def local_ranks() -> tuple[int, int]:
    """(local rank, ranks on this node), as torchrun sets them; without it this process counts as alone."""
    try:
        return int(os.environ.get("LOCAL_RANK", "0")), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 0, 1
