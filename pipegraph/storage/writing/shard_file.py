"""One shard being written: temporary name, checksum, fsync, rename."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipegraph.errors import DataError, note
from pipegraph.storage.formats import format_of
from pipegraph.storage.indexing import index_part
from pipegraph.storage.manifest import PartIndex, sync_folder
from pipegraph.storage.parts import Part
from pipegraph.storage.shard_files import LocalFile, crc32c_extend

from .encoder import Encoder, Sample

PARTIAL = ".partial-"
"""In the name of a shard that is not finished."""

_PIECE_NBYTES = 1 << 20


class _Checksummed(io.RawIOBase):
    """A file that checksums its bytes as they are written; what comes after :meth:`release` is dropped."""

    def __init__(self, path: str) -> None:
        self._path, self._extend = path, crc32c_extend()
        self.fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
        self.crc32c = self.nbytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.nbytes

    def write(self, data: Any) -> int:
        piece = bytes(data)
        if self.fd < 0:
            return len(piece)
        self.crc32c, left = self._extend(self.crc32c, piece), memoryview(piece)
        self.nbytes += len(piece)
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError as error:  # a full disk, which does not say which
            error.filename = self._path
            raise
        return len(piece)

    def release(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class OpenShard:
    """A shard that is being written; :meth:`finish` gives it its name, :meth:`abandon` leaves no trace of it."""

    def __init__(self, path: str, encoder: Encoder) -> None:
        folder, name = os.path.split(path)
        self._path, self._encoder = path, encoder
        self._temporary = os.path.join(folder, f".{name}{PARTIAL}{os.getpid()}")
        Path(self._temporary).unlink(missing_ok=True)  # of an earlier process with the same number
        self._raw = _Checksummed(self._temporary)
        self._file = io.BufferedWriter(self._raw, _PIECE_NBYTES)
        encoder.begin(self._file)

    def finish(self) -> PartIndex:
        """The shard is complete, and on the disk."""
        try:
            self._file.flush()
            crc, nbytes = self._raw.crc32c, self._raw.nbytes
            blocks = self._encoder.finish()
            self._file.flush()
            os.fsync(self._raw.fd)
            part = Part(self._path, self._raw.nbytes)
            if blocks is not None and [(b.offset, b.nbytes) for b in blocks] == [(0, nbytes)]:
                index = PartIndex(part, blocks, self._raw.crc32c, (crc,))
            else:
                with LocalFile(self._temporary) as file:
                    index = index_part(part, file, format_of(part))
            os.replace(self._temporary, self._path)
        finally:
            self.abandon()
        sync_folder(os.path.dirname(self._path))
        return index

    def abandon(self) -> None:
        """Remove what was written, if it was not finished."""
        self._raw.release()
        Path(self._temporary).unlink(missing_ok=True)


def write_shard(path: str, encoder: Encoder, samples: Iterable[tuple[int, Sample]]) -> PartIndex:
    """A whole shard."""
    shard = OpenShard(path, encoder)
    try:
        for number, sample in samples:
            try:
                encoder.add(encoder.encode(sample, number))
            except DataError as error:
                note(error, f"sample {number} of the source, in {os.path.basename(path)}")
                raise
    except BaseException:
        shard.abandon()
        raise
    return shard.finish()


def index_shard(path: str) -> PartIndex:
    """Of a finished shard."""
    part = Part(path)
    with LocalFile(path) as file:
        return index_part(part, file, format_of(part))
