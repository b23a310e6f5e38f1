"""Compressed parts: gz and zst streams piece by piece, and formats with random access unpacked into memory."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from pipegraph.errors import ShardError, StoreError, extra_module
from pipegraph.storage.shard_files import BytesFile, ShardFile

from .shard_format import BLOCK_NBYTES, Block, BlockSamples, Format, Sample

CHUNK_NBYTES: Final = 1 << 20
_ZSTD_MAGIC: Final = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
"""Of a frame, or of one that is skipped, as `pzstd` writes in front."""


def unpacked(file: ShardFile) -> Iterator[bytes]:
    """The bytes of a gz or zst stream; its first bytes say which it is. Even a stream of nothing has a header."""
    if not file.size:
        raise ShardError(f"{file.name}: broken gz or zst stream: it has 0 bytes, so its writing did not end")
    if _ZSTD_MAGIC.match(file.read_at(0, min(4, file.size))):
        return _unzstd(file)
    return _gunzip(file)


def in_memory(file: ShardFile, take_room: Callable[[int, str], None]) -> BytesFile:
    """The whole of the stream; ``take_room`` as :meth:`Format.take_room`, called as it grows."""
    whole = io.BytesIO()
    for piece in unpacked(file):
        whole.write(piece)
        take_room(whole.tell(), file.name)
    return BytesFile(whole.getvalue(), file.name)


def _gunzip(file: ShardFile) -> Iterator[bytes]:
    try:
        with file.open() as packed, gzip.GzipFile(fileobj=packed, mode="rb") as stream:
            while piece := stream.read(CHUNK_NBYTES):
                yield piece
    except StoreError:
        raise  # the bytes could not be had
    except (OSError, EOFError, zlib.error) as error:
        raise ShardError(f"{file.name}: broken gz stream: {error}") from error


def _unzstd(file: ShardFile) -> Iterator[bytes]:
    zstandard = extra_module("zstandard", "shards", f"reading {file.name}")
    # 128 MiB: the window of the strongest ordinary level; a frame may ask for far more.
    context = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    frame = None
    try:
        # Fed in pieces of 4 KiB: four bytes can stand for 128 KiB, so that each
        # step unpacks to at most 128 MiB. Not `stream_reader`: that takes a
        # stream cut in a frame's middle for its end.
        for at in range(0, file.size, 4096):
            packed = file.read_at(at, min(4096, file.size - at))
            while packed:
                frame = frame or context.decompressobj()
                piece = frame.decompress(packed)
                # Not more at a time: a list of its lines takes many times what they do.
                for start in range(0, len(piece), CHUNK_NBYTES):
                    yield piece[start : start + CHUNK_NBYTES]
                packed = b""
                if frame.eof:
                    packed, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise ShardError(f"{file.name}: broken zst stream: {error}") from error
    if frame is not None:
        raise ShardError(f"{file.name}: broken zst stream: it ends inside a frame")


class PackedFormat(Format):
    """Another format's parts, packed with gz or zst: a stream has no middle, so a part is one block."""

    needs_file = False

    def __init__(self, inner: Format, suffixes: tuple[str, ...]) -> None:
        self.inner, self.suffixes = inner, suffixes

    def choosing(self, columns: Sequence[str]) -> PackedFormat:
        return PackedFormat(self.inner.choosing(columns), self.suffixes)

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        return self.inner.samples(in_memory(file, self.take_room))

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        whole = in_memory(file, self.take_room)
        count = sum(block.samples for block in self.inner.index(whole, whole.size))
        if count:
            yield Block(0, file.size, 0, count)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        whole = in_memory(file, self.take_room)
        found = next(iter(self.inner.index(whole, whole.size)), None)
        block.check(f"{file.name}: it", found.samples if found else 0)
        assert found is not None
        rows = self.inner.read(whole, found)
        assert isinstance(rows, BlockSamples)
        rows.nbytes += whole.size
        self.take_room(rows.nbytes, file.name)
        return rows
