"""Bytes that arrive in pieces: whether all have come, and whether they are the right ones."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable

from pipegraph import concurrency

from .shard_files import LocalFile, ShardFile, crc32c_extend, file_crc32c


class _Arrival:
    """Which pieces of a range have come, in any order; one that comes again replaces the one before."""

    def __init__(self, nbytes: int, crc32c: int | None) -> None:
        self._nbytes, self._crc32c = nbytes, crc32c
        self._lock = concurrency.Lock()
        self._sizes: dict[int, int] = {}  # of the pieces, by where they begin; under the lock

    def mismatch(self) -> str | None:
        """What is wrong with what came, or None; once every call of `write_at` has returned."""
        covered = sum(self._sizes.values())
        if covered != self._nbytes:
            return f"{covered} of {self._nbytes} bytes came"
        if self._crc32c is None or (found := self._crc()) == self._crc32c:
            return None
        return f"crc32c is {found:08x}, should be {self._crc32c:08x}"

    def _crc(self) -> int:
        """Of all that came."""
        raise NotImplementedError


class FileArrival(_Arrival):
    """A sink that writes to an open file, which stays the caller's. Thread-safe; `check` raises to end the writing."""

    def __init__(self, fd: int, nbytes: int, crc32c: int | None, check: Callable[[], None]) -> None:
        super().__init__(nbytes, crc32c)
        self._fd, self._check = fd, check

    def write_at(self, offset: int, data: bytes) -> None:
        self._check()
        with self._lock:
            self._sizes[offset] = len(data)
        view, at = memoryview(data), offset
        while view:
            written = os.pwrite(self._fd, view, at)
            view, at = view[written:], at + written

    def _crc(self) -> int:
        with LocalFile.of(os.dup(self._fd), "download") as file:
            return file_crc32c(file, 0, self._nbytes)


class MemoryArrival(_Arrival, ShardFile):
    """A sink that keeps the pieces, and once `mismatch` has found all of them the file that they make.

    They are never joined: copying hundreds of megabytes would hold the GIL for as long as that takes.
    """

    def __init__(self, name: str, nbytes: int, crc32c: int | None) -> None:
        super().__init__(nbytes, crc32c)
        self.name, self.size = name, nbytes
        self._data: dict[int, bytes] = {}
        self._starts: list[int] = []

    def write_at(self, offset: int, data: bytes) -> None:
        with self._lock:
            self._sizes[offset] = len(data)
            if data:
                self._data[offset] = data

    def mismatch(self) -> str | None:
        with self._lock:
            self._starts = sorted(self._data)
        return super().mismatch()

    def _crc(self) -> int:
        extend, crc = crc32c_extend(), 0
        for start in self._starts:
            crc = extend(crc, self._data[start])
        return crc

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        if not nbytes:
            return b""
        number = bisect_right(self._starts, offset) - 1
        found: list[bytes] = []
        while nbytes:
            start = self._starts[number]
            piece = self._data[start][offset - start : offset - start + nbytes]
            found.append(piece)
            offset, nbytes, number = offset + len(piece), nbytes - len(piece), number + 1
        return found[0] if len(found) == 1 else b"".join(found)

    def close(self) -> None:
        pass
