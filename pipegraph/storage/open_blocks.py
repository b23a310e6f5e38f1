"""Opens one block of a part, through the node cache or into memory."""

from __future__ import annotations

import os
from collections.abc import Callable

from pipegraph.errors import ChecksumError, ShardError, StoreError
from pipegraph.storage.formats.shard_format import Block

from .arrival import MemoryArrival
from .entries import Cacheable, Download, Sink
from .local import LocalParts, PartFile, Reopenable
from .node_cache import DOWNLOADS, NodeCache
from .object_file import identify, open_part
from .parts import Part
from .shard_files import LocalFile, OverlayFile, ShardFile
from .stores import StoreClient, safe_url


def cacheable(part: Part, block: Block, crc32c: int | None = None) -> Cacheable:
    """The cache entry that `open_block` uses for a block of an identified part."""
    # The folder that a process works in is not part of a file's name for others.
    uri = os.path.abspath(part.uri) if part.is_local else part.uri
    return Cacheable(uri, block.nbytes, block.offset, part.size, part.version, crc32c)


def open_block(
    part: Part,
    block: Block,
    *,
    crc32c: int | None = None,
    store: StoreClient | None = None,
    cache: NodeCache | None = None,
    local: LocalParts | None = None,
    no_room: Callable[[OSError], None] = lambda error: None,
) -> ShardFile:
    """Open a part for ``format.read(file, block)``, whose bytes are local when this returns. Blocks for the download.

    A local part is read in place unless there is a cache (then it is taken to lie on slow storage); its checksum is
    computed once for as long as the file is the same. Anything else is fetched whole: into the cache, or, without one
    or where that has no room (``no_room`` is told), into memory. Reads outside the block, such as Parquet's footer, go
    to the part itself.

    Raises:
        ChecksumError: the bytes never matched `crc32c`.
        DataError, ShardError: as `open_part` and `StoreClient.submit`.
    """
    local = local or LocalParts()
    if cache is not None:
        part = identify(part, store)
    base = local.open(part) if part.is_local else open_part(part, store)
    try:
        what = cacheable(part, block, crc32c)
        if isinstance(base, PartFile) and cache is None:
            if crc32c is not None and (found := local.matches(base, block, crc32c)) is not None:
                raise _mismatch(what, f"crc32c is {found:08x}, should be {crc32c:08x}")
            return base

        def bring(sink: Sink) -> None:
            if store is not None and not part.is_local:
                store.download(part.uri, block.offset, block.nbytes, sink)
            else:
                _copy(base, block, sink)
                identify(part)  # what was written to meanwhile is of no version

        if cache is None:
            return OverlayFile(base, block.offset, _into_memory(what, bring))

        def fetch() -> ShardFile:
            try:
                return cache.fetch(what, bring)
            except StoreError:
                raise
            except OSError as error:  # no room, or the folder is gone
                no_room(error)
                return _into_memory(what, bring)

        entry = fetch()
        inner = CachedEntry(entry, fetch, local) if isinstance(entry, LocalFile) else entry
        return OverlayFile(base, block.offset, inner)
    except BaseException:
        base.close()
        raise


class CachedEntry(Reopenable[ShardFile]):
    """An entry of a cache, or its bytes in memory. While it is closed it may be evicted; it is fetched again then."""

    def __init__(self, entry: ShardFile, fetch: Callable[[], ShardFile], local: LocalParts) -> None:
        super().__init__(local.entries)
        self.name, self.size, self._fetch = entry.name, entry.size, fetch
        local.entries.admit(self, entry)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        try:
            return self.opened().read_at(offset, nbytes)
        except (ShardError, OSError):  # cut short or lost behind our back: what it was made from may be whole
            self.close()
            return self.opened().read_at(offset, nbytes)

    def _open_again(self) -> ShardFile:
        return self._fetch()


def _into_memory(what: Cacheable, download: Download) -> MemoryArrival:
    found = None
    for _ in range(DOWNLOADS):
        held = MemoryArrival(safe_url(what.uri), what.nbytes, what.crc32c)
        download(held)
        found = held.mismatch()
        if found is None:
            return held
    raise _mismatch(what, f"{found}, after {DOWNLOADS} downloads")


def _mismatch(what: Cacheable, found: str) -> ChecksumError:
    return ChecksumError(
        f"{safe_url(what.uri)}, bytes {what.offset}..{what.offset + what.nbytes}: {found}. Either the source or its "
        "manifest is wrong: compare them, then index again"
    )


def _copy(base: ShardFile, block: Block, sink: Sink) -> None:
    step = 4 << 20
    for at in range(0, block.nbytes, step):
        sink.write_at(at, base.read_at(block.offset + at, min(step, block.nbytes - at)))
