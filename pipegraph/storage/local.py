"""The local parts that one reader reads in place: few open at a time, each block's checksum computed once."""

from __future__ import annotations

import os
import threading
from typing import final

from pipegraph.errors import ShardError
from pipegraph.machine import open_files_limit
from pipegraph.storage.formats.shard_format import Block

from .checksum import file_crc32c
from .opening import open_part
from .parts import Part
from .shard_files import LocalFile, ShardFile

LOOK_EVERY = 16
"""Reads between two looks at whether an open file was written over: a look costs as much as a small read."""

Identity = tuple[int, int, int, int]
"""Device, inode, size and modification time in ns: what shows that a file is unchanged."""


@final
class LocalParts:
    """Opens local parts so that any number of them can be in use. Thread-safe.

    Args:
        max_open: files open at once, beside those that are being read from; an eighth of what the process may
            open by default, so that several readers and caches fit beside what the training opens.
    """

    def __init__(self, max_open: int | None = None) -> None:
        self._max_open = max_open or max(4, open_files_limit() // 8)
        # Guards both tables. A file that leaves the first is closed when its last read has ended.
        self._lock = threading.Lock()
        self._open: dict[PartFile, None] = {}  # the one opened longest ago first
        self._verified: dict[tuple[str, int, int, int], Identity] = {}

    def open(self, part: Part) -> PartFile:
        """A part for reading; the caller closes it.

        Raises:
            DataError: as `open_part`.
        """
        return PartFile(part, self)

    def matches(self, file: PartFile, block: Block, crc32c: int) -> int | None:
        """None if a block's bytes have this checksum, else the one they have.

        What was found right is not read again for as long as the file is the same.
        """
        what = (file.name, block.offset, block.nbytes, crc32c)
        with self._lock:
            if self._verified.get(what) == file.identity:
                return None
        found = file_crc32c(file, block.offset, block.nbytes)
        if found != crc32c:
            return found
        with self._lock:
            self._verified[what] = file.identity
        return None

    def _admit(self, file: PartFile, opened: LocalFile) -> None:
        with self._lock:
            self._open[file] = None
            file._file = opened
            while len(self._open) > self._max_open:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest._file = None

    def _dismiss(self, file: PartFile) -> None:
        with self._lock:
            self._open.pop(file, None)
            file._file = None


@final
class PartFile(ShardFile):
    """A local part that is opened again where it had to be closed to make room for others.

    Attributes:
        identity: of the file when it was opened first.
    """

    def __init__(self, part: Part, parts: LocalParts) -> None:
        self._part, self._parts = part, parts
        self._file: LocalFile | None = None
        self._reads = 0  # several threads count: a lost one only moves the next look
        opened = _opened(part)
        self.name, self.size, self.identity = opened.name, opened.size, identity_of(opened)
        parts._admit(self, opened)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        # The reference keeps the file open for this read, whoever makes room meanwhile.
        file = self._file or self._reopen()
        data = file.read_at(offset, nbytes)
        self._reads += 1
        if not self._reads % LOOK_EVERY and os.fstat(file.fileno()).st_mtime_ns != self.identity[3]:
            raise self._changed()
        return data

    def _reopen(self) -> LocalFile:
        opened = _opened(self._part)
        if identity_of(opened) != self.identity:
            raise self._changed()
        self._parts._admit(self, opened)
        return opened

    def _changed(self) -> ShardError:
        return ShardError(f"{self.name}: the file was changed while it was read; index the parts again")

    def close(self) -> None:
        self._parts._dismiss(self)


def _opened(part: Part) -> LocalFile:
    file = open_part(part)
    assert isinstance(file, LocalFile)
    return file


def identity_of(file: LocalFile) -> Identity:
    """Of an open file."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
