"""The files that one reader reads: few open at a time, each local block's checksum computed once."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, Generic, TypeVar, final

from pipegraph import concurrency
from pipegraph.errors import ShardError
from pipegraph.machine import open_files_limit
from pipegraph.storage.formats.shard_format import Block

from .object_file import open_part
from .parts import Part, file_version, written_again
from .shard_files import LocalFile, ShardFile, file_crc32c

LOOK_EVERY = 16
"""Reads between two looks at whether an open file was written over: a look costs as much as a small read."""

F = TypeVar("F", bound=ShardFile)


class Reopenable(ShardFile, Generic[F]):
    """A file that is opened again where it had to be closed to make room for others."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._file: F | None = None

    def opened(self) -> F:
        """The open file; the reference keeps it open, even if another thread makes room meanwhile."""
        file = self._file
        if file is None:
            file = self._open_again()
            self._files.admit(self, file)
        return file

    @abstractmethod
    def _open_again(self) -> F: ...

    def close(self) -> None:
        self._files.dismiss(self)


class OpenFiles:
    """Which of many files are open. Thread-safe."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        # Guards the table. A file that leaves it is closed when its last read has ended.
        self._lock = concurrency.Lock()
        self._open: dict[Reopenable[Any], None] = {}  # the one opened longest ago first

    def admit(self, file: Reopenable[F], opened: F) -> None:
        """It is open; others are closed for it."""
        with self._lock:
            self._open[file] = None
            file._file = opened
            while len(self._open) > self._max_open:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest._file = None

    def dismiss(self, file: Reopenable[Any]) -> None:
        """It is not needed any more."""
        with self._lock:
            self._open.pop(file, None)
            file._file = None


@final
class LocalParts:
    """Opens local parts so that any number of them can be in use. Thread-safe.

    At most ``max_open`` parts, and as many entries of a cache, are open at once: by default an eighth each of what the
    process may open, so that several readers fit beside what the training opens.
    """

    def __init__(self, max_open: int | None = None) -> None:
        limit = max_open or max(4, open_files_limit() // 8)
        self.parts, self.entries = OpenFiles(limit), OpenFiles(limit)
        self._lock = concurrency.Lock()  # guards the table of checksums
        self._verified: dict[tuple[str, int, int, int], str] = {}

    def open(self, part: Part) -> PartFile:
        """A part for reading; the caller closes it. Raises as `open_part`."""
        return PartFile(part, self)

    def matches(self, file: PartFile, block: Block, crc32c: int) -> int | None:
        """None if a block's bytes have this checksum, else theirs; not read again while the file is the same."""
        what = (file.name, block.offset, block.nbytes, crc32c)
        now = file.version()
        with self._lock:
            if self._verified.get(what) == now:
                return None
        found = file_crc32c(file, block.offset, block.nbytes)
        if found != crc32c:
            return found
        with self._lock:
            self._verified[what] = now
        return None


class PartFile(Reopenable[LocalFile]):
    """A local part; it must stay the file that it was when it was opened first."""

    def __init__(self, part: Part, parts: LocalParts) -> None:
        super().__init__(parts.parts)
        self._part = part
        self._reads = 0  # several threads count: a lost one only moves the next look
        opened = _opened(part)
        self.name, self.size, self._first = opened.name, opened.size, file_version(opened.status)
        parts.parts.admit(self, opened)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        file = self.opened()
        data = file.read_at(offset, nbytes)
        self._reads += 1
        if not self._reads % LOOK_EVERY:
            self._check(os.fstat(file.fileno()))
        return data

    def version(self) -> str:
        """Of the file as it is now; its last part no program can set back."""
        file = (
            self.opened()
        )  # a reference, so that another thread that makes room does not close it meanwhile
        return file_version(os.fstat(file.fileno()))

    def _open_again(self) -> LocalFile:
        opened = _opened(self._part)
        self._check(opened.status)
        return opened

    def _check(self, status: os.stat_result) -> None:
        if status.st_size != self.size or written_again(self._first, status):
            raise ShardError(f"{self.name}: the file was changed while it was read; index the parts again")


def _opened(part: Part) -> LocalFile:
    file = open_part(part)
    assert isinstance(file, LocalFile)
    return file
