"""One block of a part, brought near: through the node cache, or into memory."""

from __future__ import annotations

import errno
from typing import final

from pipegraph.errors import ChecksumError

from .cache import DOWNLOADS, Cacheable, Download, NodeCache, Sink
from .checksum import crc32c_extend
from .files import BytesFile, OverlayFile, ShardFile
from .formats.base import Block
from .opening import open_part
from .parts import Part
from .stores import StoreClient, safe_url


def cacheable(part: Part, block: Block, crc32c: int | None = None, version: str | None = None) -> Cacheable:
    """The cache entry that `open_block` uses for a block."""
    return Cacheable(part.uri, block.nbytes, block.offset, part.size, version, crc32c)


def open_block(
    part: Part,
    block: Block,
    *,
    crc32c: int | None = None,
    store: StoreClient | None = None,
    cache: NodeCache | None = None,
    version: str | None = None,
) -> ShardFile:
    """Open a part for ``format.read(file, block)``, the block's bytes being near when this returns.

    A local part is read in place unless there is a cache (then it is taken to lie on slow
    storage, such as a mounted cluster file system). Anything else is fetched whole: into
    the cache, or, without one or where that has no room, into memory. Reads outside
    the block, such as Parquet's footer, go to the part itself.

    Blocks for as long as the download takes, in the calling thread.

    Args:
        crc32c: of the block's bytes, if known: checked, and fetched again if wrong.
        store: for a remote part; it must outlive the file.
        version: the part's etag, if known.

    Raises:
        ChecksumError: the bytes never matched `crc32c`.
        DataError, ShardError: as `open_part` and `StoreClient.submit`.
    """
    base = open_part(part, store)
    if part.is_local and cache is None:
        return base
    try:
        what = cacheable(part, block, crc32c, version)

        def download(sink: Sink) -> None:
            if store is not None and not part.is_local:
                store.download(part.uri, block.offset, block.nbytes, sink, version=version)
            else:
                _copy(base, block, sink)

        if cache is not None:
            try:
                return _Near(base, block, cache.fetch(what, download))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        return _Near(base, block, _into_memory(what, download))
    except BaseException:
        base.close()
        raise


def _into_memory(what: Cacheable, download: Download) -> BytesFile:
    for _ in range(DOWNLOADS):
        held = _Memory(what.nbytes)
        download(held)
        data = bytes(held.data)
        if what.crc32c is None or crc32c_extend()(0, data) == what.crc32c:
            return BytesFile(data, safe_url(what.uri))
    raise ChecksumError(
        f"{safe_url(what.uri)}, bytes {what.offset}..{what.offset + what.nbytes}: crc32c never matched, after "
        f"{DOWNLOADS} downloads. Either the source or its manifest is wrong: compare them, then index again"
    )


def _copy(base: ShardFile, block: Block, sink: Sink) -> None:
    step = 4 << 20
    for at in range(0, block.nbytes, step):
        sink.write_at(at, base.read_at(block.offset + at, min(step, block.nbytes - at)))


class _Memory:
    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def write_at(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data


@final
class _Near(ShardFile):
    """A part with one block near; closes both."""

    def __init__(self, base: ShardFile, block: Block, near: ShardFile) -> None:
        self.name, self.size, self._base = base.name, base.size, base
        self._file = OverlayFile(base, block.offset, near)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_at(offset, nbytes)

    def close(self) -> None:
        self._file.close()
        self._base.close()
