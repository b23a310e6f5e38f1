"""The files that one reader reads: few of them are open at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar, final

from pipegraph import concurrency

from .object_file import check_status, open_local
from .parts import Part, file_version
from .shard_files import LocalFile, ShardFile

LOOK_EVERY = 16
"""Reads between two looks at whether an open file was written over: a look costs as much as a small read."""

F = TypeVar("F", bound=ShardFile)


class Reopened(ShardFile, Generic[F]):
    """A file that a pool closes to make room for others; the next read opens it again."""

    def __init__(self, pool: FilePool, file: F, open: Callable[[], F]) -> None:
        self.name, self.size = file.name, file.size
        self._pool, self._open = pool, open
        self.file: F | None = None
        pool.admit(self, file)

    def opened(self) -> F:
        """The open file; the reference keeps it open, even if another thread makes room meanwhile."""
        file = self.file
        if file is None:
            file = self._open()
            self._pool.admit(self, file)
        return file

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self.opened().read_at(offset, nbytes)

    def close(self) -> None:
        self._pool.dismiss(self)


@final
class PartFile(Reopened[LocalFile]):
    """A local part; it must stay the file that it was when it was opened first."""

    def __init__(self, pool: FilePool, part: Part) -> None:
        file = open_local(part)
        self._part = part = replace(part, size=file.size, version=file_version(file.status))
        self._reads = 0  # several threads count: a lost one only moves the next look
        super().__init__(pool, file, lambda: open_local(part))

    def read_at(self, offset: int, nbytes: int) -> bytes:
        file = self.opened()
        data = file.read_at(offset, nbytes)
        self._reads += 1
        if not self._reads % LOOK_EVERY:
            check_status(self._part, os.fstat(file.fileno()))
        return data

    def version(self) -> str:
        """Of the file as it is now; its last part no program can set back."""
        file = self.opened()  # a reference: another thread may make room meanwhile
        return file_version(os.fstat(file.fileno()))


@final
class FilePool:
    """Which of many files are open. Thread-safe."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        # Guards the table. A file that leaves it is closed when its last read has ended.
        self._lock = concurrency.Lock()
        self._open: dict[ShardFile, None] = {}  # the one opened longest ago first

    def admit(self, file: Reopened[F], opened: F) -> None:
        """It is open; others are closed for it."""
        with self._lock:
            self._open[file] = None
            file.file = opened
            while len(self._open) > self._max_open:
                oldest = next(iter(self._open))
                assert isinstance(oldest, Reopened)
                del self._open[oldest]
                oldest.file = None

    def dismiss(self, file: Reopened[F]) -> None:
        """It is not needed any more."""
        with self._lock:
            self._open.pop(file, None)
            file.file = None
