"""The bytes of a reader's blocks: read in place, or fetched through the node cache or into memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import final

from pipegraph import concurrency
from pipegraph.errors import StoreError
from pipegraph.machine import open_files_limit
from pipegraph.stopping import Closing
from pipegraph.storage.formats.shard_format import Block

from .node_cache import DOWNLOADS, NO_ROOM, Cacheable, Download, NodeCache, Write, mismatch
from .part_files import FilePool, Reopened, identify, open_part, pooled_part
from .parts import Part
from .shard_files import BytesFile, LocalFile, OverlayFile, ShardFile, file_crc32c
from .stores import StoreClient, safe_url

_log = logging.getLogger("pipegraph.cache")

_COPIED_NBYTES = 4 << 20


@final
class BlockBytes(Closing):
    """The bytes of blocks. Closing it ends all waits; it owns the store client and the cache's handle.

    A local part is read in place unless there is a cache (then it is taken to lie on slow storage); its checksum is
    computed once. Anything else is fetched whole: into the cache, or, without one
    or where that has no room, into memory.

    Attributes:
        memory: bytes of memory that blocks may take.
        fetched: whether blocks are fetched, from a store or to a cache.
        in_memory: whether fetched blocks lie in memory: without a cache, and from where it has no room on.
    """

    def __init__(
        self,
        store: StoreClient | None = None,
        cache: NodeCache | None = None,
        memory: int = 1,
        count: Callable[[str, int], None] = lambda name, more: None,
        max_open: int | None = None,
    ) -> None:
        self.store, self.cache, self.memory, self._count = store, cache, max(1, memory), count
        self.fetched, self.in_memory = store is not None or cache is not None, cache is None
        # An eighth each of what the process may open: several readers fit beside what the training opens.
        limit = max_open or max(4, open_files_limit() // 8)
        self._parts, self._entries = FilePool(limit), FilePool(limit)
        self._lock = concurrency.Lock()  # guards the table of checksums
        self._verified = set[Cacheable]()

    def budget(self) -> int:
        """Bytes for blocks: this rank's share of the cache, else of memory."""
        if self.cache is None or self.in_memory:
            return self.memory
        try:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this node, as torchrun sets it
        except ValueError:
            ranks = 1
        return max(1, self.cache.limit // max(1, ranks))

    def part(self, part: Part) -> ShardFile:
        """A part as it lies. Raises as `open_part`."""
        return pooled_part(self._parts, part) if part.is_local else open_part(part, self.store)

    def open(self, part: Part, block: Block, crc32c: int | None = None) -> ShardFile:
        """Open a part for ``format.read(file, block)``, whose bytes are local when this returns. Blocks for the
        download. Reads outside the block, such as of Parquet's footer, go to the part itself.

        Raises:
            ChecksumError: the bytes never matched `crc32c`.
            DataError, ShardError: as `open_part` and `StoreClient.submit`.
        """
        if self.cache is not None:
            part = identify(part, self.store)
        base = self.part(part)
        try:
            what = cacheable(part, block, crc32c)
            if self.cache is None and part.is_local:
                self._check(base, what)
                return base
            inner = self._fetched(what, partial(self._download, part, base, block))
            return OverlayFile(base, block.offset, inner)
        except BaseException:
            base.close()
            raise

    def _check(self, file: ShardFile, what: Cacheable) -> None:
        """Raise ChecksumError unless the bytes match; they are read once."""
        if what.crc32c is None:
            return
        with self._lock:
            if what in self._verified:
                return
        found = file_crc32c(file, what.offset, what.nbytes)
        if found != what.crc32c:
            raise mismatch(what, found, "")
        with self._lock:
            self._verified.add(what)

    def _fetched(self, what: Cacheable, download: Download) -> ShardFile:
        entry = self._entry(what, download)
        if not isinstance(entry, LocalFile):
            return entry
        # While it is closed it may be evicted; it is fetched again then.
        return Reopened(self._entries, entry, partial(self._entry, what, download))

    def _entry(self, what: Cacheable, download: Download) -> ShardFile:
        """An entry of the cache, or its bytes in memory."""
        if self.cache is not None:
            try:
                return self.cache.fetch(what, download)
            except StoreError:
                raise
            except OSError as error:  # no room, or the folder is gone
                if error.errno not in NO_ROOM and not self.in_memory:
                    _log.warning("the node cache cannot be used, blocks are read into memory: %s", error)
                self.in_memory = True
                self._count("blocks without room in the cache", 1)
        return _into_memory(what, download)

    def _download(self, part: Part, base: ShardFile, block: Block, write: Write) -> None:
        if self.store is not None and not part.is_local:
            self.store.download(part.uri, block.offset, block.nbytes, write)
            return
        for at in range(0, block.nbytes, _COPIED_NBYTES):
            write(at, base.read_at(block.offset + at, min(_COPIED_NBYTES, block.nbytes - at)))
        identify(part)  # what was written to meanwhile is of no version

    def close(self) -> None:
        """End every wait and every transfer. Idempotent."""
        for each in (self.cache, self.store):
            if each is not None:
                each.close()


def cacheable(part: Part, block: Block, crc32c: int | None = None) -> Cacheable:
    """The cache entry of a block of an identified part."""
    # The folder that a process works in is not part of a file's name for others.
    uri = os.path.abspath(part.uri) if part.is_local else part.uri
    return Cacheable(uri, block.nbytes, block.offset, part.size, part.version, crc32c)


def _into_memory(what: Cacheable, download: Download) -> BytesFile:
    for _ in range(DOWNLOADS):
        pieces: dict[int, bytes] = {}
        download(pieces.__setitem__)
        held = BytesFile(b"".join(pieces[at] for at in sorted(pieces)), safe_url(what.uri))
        if what.crc32c is None or (found := file_crc32c(held, 0, held.size)) == what.crc32c:
            return held
    raise mismatch(what, found, f", after {DOWNLOADS} downloads")
