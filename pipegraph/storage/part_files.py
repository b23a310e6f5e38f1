"""Opens parts as shard files: local ones, of which few are open at a time, and objects of a store with read-ahead for
sequential reads.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import final

from pipegraph import concurrency
from pipegraph.errors import DataError, LoaderClosedError

from .parts import Part, file_version, written_again
from .shard_files import LocalFile, ShardFile
from .stores import Request, StoreClient, answer_of, safe_url


@final
class RemoteFile(ShardFile):
    """An object. Reads in order go through pieces that are fetched ahead; others are ranges of their own.

    `read_at` is thread-safe; a file that several read in order at different places is read ahead for none of them. At
    least `keep_nbytes` of what was read in order are kept, for a second look. Where the part's size is known, the store
    is asked, and raises what is wrong, at the first read only.
    """

    def __init__(self, part: Part, store: StoreClient, *, keep_nbytes: int = 0) -> None:
        self.name = safe_url(part.uri)
        self._url, self._store = part.uri, store
        if part.size is None:
            part = store.identify(part)
        else:
            store.expect(part)
        assert part.size is not None
        self.size = part.size
        self._keep = max(2, -(-keep_nbytes // store.range_nbytes))
        self._lock = concurrency.Lock()
        self._pieces: OrderedDict[int, Request[bytes]] = OrderedDict()
        self._last = (0, 0)  # the range read last

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.check_range(offset, nbytes)
        if nbytes == 0:
            return b""
        step = self._store.range_nbytes
        first, last = offset // step, (offset + nbytes - 1) // step
        with self._lock:
            known = all(number in self._pieces for number in range(first, last + 1))
            # A reader in order may take up again what its last read ended in.
            in_order = self._last[0] <= offset < self._last[1] + step
            self._last = (offset, offset + nbytes)
            pieces = self._wanted(first, last) if known or in_order else None
        if pieces is None:
            return self._store.read(self._url, offset, nbytes)
        try:
            data = [answer_of(piece) for piece in pieces]
        except LoaderClosedError:  # or another read, which needed the room, has cancelled a piece
            return self._store.read(self._url, offset, nbytes)
        except BaseException:
            with self._lock:  # another read may fare better
                for number in range(first, last + 1):
                    self._pieces.pop(number, None)
            raise
        data[-1] = data[-1][: offset + nbytes - last * step]
        data[0] = data[0][offset - first * step :]
        return data[0] if len(data) == 1 else b"".join(data)

    def _wanted(self, first: int, last: int) -> list[Request[bytes]]:
        """The pieces of a read, begun if need be, and those ahead of it begun too."""
        step, ahead = self._store.range_nbytes, self._store.parallel
        pieces = []
        for number in range(first, min(last + ahead, (self.size - 1) // step) + 1):
            if number not in self._pieces:
                start = number * step
                length = min(step, self.size - start)
                self._pieces[number] = self._store.submit(self._url, start, length)
            self._pieces.move_to_end(number)
            if number <= last:
                pieces.append(self._pieces[number])
        while len(self._pieces) > self._keep + ahead + last - first + 1:
            self._pieces.popitem(last=False)[1].cancel()
        return pieces

    def close(self) -> None:
        with self._lock:
            pieces, self._pieces = list(self._pieces.values()), OrderedDict()
        for piece in pieces:
            piece.cancel()


def identify(part: Part, store: StoreClient | None = None) -> Part:
    """The part with its size and version; a store is asked where it has not said them yet."""
    if not part.is_local:
        assert store is not None
        return store.identify(part)
    try:
        status = os.stat(part.uri)
    except OSError as error:
        raise DataError(f"part {part.uri!r}: cannot be opened: {error.strerror}") from error
    check_status(part, status)
    return replace(part, size=status.st_size, version=file_version(status))


def open_part(part: Part, store: StoreClient | None = None, *, keep_nbytes: int = 0) -> ShardFile:
    """Open a part for reading; the caller closes it.

    Raises:
        DataError: a part is missing, or its size or version is not the one it should have.
    """
    if not part.is_local:
        assert store is not None
        return RemoteFile(part, store, keep_nbytes=keep_nbytes)
    return open_local(part)


def open_local(part: Part) -> LocalFile:
    """As `open_part`."""
    try:
        file = LocalFile(part.uri)
    except OSError as error:
        raise DataError(f"part {part.uri!r}: cannot be opened: {error.strerror}") from error
    try:
        check_status(part, file.status)
    except DataError:
        file.close()
        raise
    return file


def check_status(part: Part, status: os.stat_result) -> None:
    """Raises DataError unless a local file is the part."""
    if part.size is not None and status.st_size != part.size:
        why = (
            "was changed: " if status.st_size > part.size else "was cut short or changed: copy it again, or "
        )
        raise DataError(
            f"part {part.uri!r}: has {status.st_size} bytes, its manifest says {part.size}; it {why}index again"
        )
    if part.version is not None and written_again(part.version, status):
        raise DataError(
            f"part {part.uri!r}: was written again since it was looked up; index the parts again, and make the graph "
            "and its loader anew"
        )


@final
class Reopened(ShardFile):
    """A file that a pool closes to make room for others; the next read opens it again."""

    def __init__(self, pool: FilePool, file: ShardFile, open: Callable[[], ShardFile]) -> None:
        self.name, self.size = file.name, file.size
        self._pool, self._open = pool, open
        self.file: ShardFile | None = None
        pool.admit(self, file)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        file = self.file  # the reference keeps it open, even if another thread makes room meanwhile
        if file is None:
            file = self._open()
            self._pool.admit(self, file)
        return file.read_at(offset, nbytes)

    def close(self) -> None:
        self._pool.dismiss(self)


def pooled_part(pool: FilePool, part: Part) -> ShardFile:
    """A local part; it must stay the file that it was when it was opened first."""
    file = open_local(part)
    part = replace(part, size=file.size, version=file_version(file.status))
    return Reopened(pool, file, lambda: open_local(part))


@final
class FilePool:
    """Which of many files are open. Thread-safe."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        # Guards the table. A file that leaves it is closed when its last read has ended.
        self._lock = concurrency.Lock()
        self._open: dict[Reopened, None] = {}  # the one opened longest ago first

    def admit(self, file: Reopened, opened: ShardFile) -> None:
        """It is open; others are closed for it."""
        with self._lock:
            self._open[file] = None
            file.file = opened
            while len(self._open) > self._max_open:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.file = None

    def dismiss(self, file: Reopened) -> None:
        """It is not needed any more."""
        with self._lock:
            self._open.pop(file, None)
            file.file = None
