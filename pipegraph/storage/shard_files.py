"""One shard as random-access bytes, local or remote; and all of a file at once.

Formats see a `ShardFile` and nothing else: a local file, an object in a store
and a cached block of either look the same.
"""

from __future__ import annotations

import io
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, Final, final

from pipegraph import concurrency
from pipegraph.errors import DataError, ShardError, extra_module, shown
from pipegraph.paths import PATHS, TO_READ
from pipegraph.stopping import Closing

if hasattr(os, "pread"):
    pread = os.pread
else:  # Windows, where threads take turns at the position of the open file
    _turn = concurrency.Lock()

    def pread(fd: int, nbytes: int, offset: int, /) -> bytes:
        """Bytes from an offset."""
        with _turn:
            os.lseek(fd, offset, os.SEEK_SET)
            return os.read(fd, nbytes)


# One pread of this size keeps both the page-cache copy and the slices taken
# from it in a core's L2.
STREAM_NBYTES: Final = 1 << 18


class ShardFile(Closing, ABC):
    """The bytes of one shard, with its size and, for messages, its path or URL. `read_at` is thread-safe."""

    name: str
    size: int
    stream_nbytes: int = STREAM_NBYTES
    """How much a sequential reader should ask for at once."""

    @abstractmethod
    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset`; raises ShardError if the shard ends before that."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. Idempotent."""

    def open(self) -> io.BufferedReader:
        """A buffered binary file over this shard, for libraries that need one."""
        return io.BufferedReader(self.open_raw(), self.stream_nbytes)

    def open_raw(self) -> io.RawIOBase:
        """The same without a buffer: each of its reads is one `read_at`."""
        return _RawView(self)

    def check_range(self, offset: int, nbytes: int) -> None:
        """Refuse a range outside the shard, before anything is allocated for it."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise ShardError(
                f"{self.name}: bytes {offset}..{offset + nbytes} asked for, but the shard has {self.size}; "
                "it is truncated or its index belongs to another file"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.size} bytes>"


@final
class LocalFile(ShardFile):
    """A file, read in place with ``pread``: no memory is held, no position shared, and the GIL is free while the disk
    works.

    Not ``mmap``: a file cut short under a map kills the process (SIGBUS) where ``pread`` gives an error.
    """

    def __init__(self, path: str | os.PathLike[str], fd: int | None = None) -> None:
        """`fd`: of a file that is open already; `close` closes it."""
        fd = os.open(path, TO_READ) if fd is None else fd
        self.name, self.status, self._fd = os.fspath(path), os.fstat(fd), fd
        self.size = self.status.st_size

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        data = pread(self._fd, nbytes, offset)
        while len(data) != nbytes:  # one pread gives at most 2 GiB - 4 KiB on Linux
            more = pread(self._fd, nbytes - len(data), offset + len(data))
            if not more:
                raise ShardError(
                    f"{self.name}: the file was cut short to {os.fstat(self._fd).st_size} bytes while it was read"
                )
            data += more
        return data

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


@final
class BytesFile(ShardFile):
    """A shard that lies in memory."""

    def __init__(self, data: bytes, name: str = "<memory>") -> None:
        self.name, self.size, self._data = name, len(data), data

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        return self._data[offset : offset + nbytes]

    def close(self) -> None:
        pass


@final
class OverlayFile(ShardFile):
    """A shard of which one range lies elsewhere, such as a cached block.

    So a format finds a block's bytes at the offsets that they have in the shard, and a footer where it always is.
    """

    def __init__(self, base: ShardFile, offset: int, inner: ShardFile) -> None:
        base.check_range(offset, inner.size)
        self.name, self.size = base.name, base.size
        self._base, self._offset, self._inner = base, offset, inner

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        stop, inner_stop = offset + nbytes, self._offset + self._inner.size
        start, end = max(offset, self._offset), min(stop, inner_stop)
        if start >= end:
            return self._base.read_at(offset, nbytes)
        data = self._inner.read_at(start - self._offset, end - start)
        if offset < start:
            data = self._base.read_at(offset, start - offset) + data
        if end < stop:
            data += self._base.read_at(end, stop - end)
        return data

    def close(self) -> None:
        self._inner.close()
        self._base.close()


class _RawView(io.RawIOBase):
    """`ShardFile` behind the interface of a raw binary file."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._position, self._file.size)[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        nbytes = max(0, min(len(view), self._file.size - self._position))
        view[:nbytes] = self._file.read_at(self._position, nbytes)
        self._position += nbytes
        return nbytes


# Large enough that calls do not count, small enough to stay in a core's cache.
_PIECE_NBYTES: Final = 1 << 20


@cache
def crc32c_extend() -> Callable[[int, bytes], int]:
    """``extend(crc, data) -> crc``."""
    extend: Callable[[int, bytes], int] = extra_module("google_crc32c", "shards", "checking shards").extend
    return extend


def file_crc32c(file: ShardFile, offset: int, nbytes: int, crc: int = 0) -> int:
    """The checksum of a range, continued from `crc`."""
    extend = crc32c_extend()
    for at in range(offset, offset + nbytes, _PIECE_NBYTES):
        crc = extend(crc, file.read_at(at, min(_PIECE_NBYTES, offset + nbytes - at)))
    return crc


def read_file(path: Any) -> bytes:
    """All of a regular file; in four system calls, during each of which another thread may take the interpreter."""
    if not isinstance(path, PATHS):  # a number is an open file of another's
        raise DataError(f"Load: a sample's 'path' must be a path, got {shown(path)}")
    file = os.open(path, TO_READ)
    try:
        status = os.fstat(file)
        # Before it is read: of a pipe there is what was written so far, and a device may have no end.
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"Load: {os.fspath(path)!r} is no regular file (a folder, a pipe or a device)")
        content = os.read(file, status.st_size + 1)
        # A file that grows, one of /proc, and one larger than the system reads at once.
        if len(content) != status.st_size:
            with open(file, "rb", closefd=False) as rest:
                content += rest.read()
    finally:
        os.close(file)
    return content
