"""The node cache: parts and blocks on a local disk, shared by all ranks of a node.

Invariants, at every moment and whichever process is killed:

- A file under ``objects/`` is whole, and its bytes had the right size and checksum and were synced
  when it was renamed to there; it is never written to again.
- A file under ``partial/`` belongs to the one process that holds its exclusive
  lock; without a lock it is a dead process's, and anyone may take it over.
- Readers hold a lock on the file they read. To remove one, a process takes
  the exclusive lock without waiting, and leaves it alone if that fails.

Usage is the sum of what lies in the folder, so that no counter can be wrong. Space is made and reserved under the
lock of ``space.lock``, which is never held over a download or a sync. A full cache keeps what came first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, final

from pipegraph import concurrency
from pipegraph.errors import ChecksumError, DataError, LoaderClosedError
from pipegraph.paths import path_of
from pipegraph.stopping import Closing
from pipegraph.units import format_bytes, parse_bytes

from .locks import LOCK_EX, LOCK_SH, NO_LOCKS, LockWaits, flock, is_at, try_exclusive
from .manifest import sync_folder
from .parts import safe_url
from .shard_files import LocalFile, file_crc32c

# One, and three more after bytes that do not match: at one bad transfer in five, two in
# a thousand entries are given up.
DOWNLOADS: Final = 4

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk says that takes no more of this user's bytes: it is full, or the user's quota is."""


@dataclass(frozen=True)
class Cacheable:
    """What may be cached: a range of a part, with what is known of the part.

    Of several versions of the same bytes a cache keeps the newest.
    """

    uri: str
    nbytes: int
    offset: int = 0
    part_nbytes: int | None = None
    version: str | None = None
    crc32c: int | None = None

    @cached_property
    def place(self) -> str:
        """What the names of all versions of this entry begin with: a hash of which bytes are meant."""
        return _hash([self.uri, self.offset, self.nbytes, self.crc32c], 20)

    @cached_property
    def name(self) -> str:
        """The entry's file name: hashes, so that nothing of a URI reaches the file system."""
        return self.place + _hash([self.part_nbytes, self.version], 8)


def mismatch(what: Cacheable, found: int, more: str) -> ChecksumError:
    """The error for bytes that have another checksum than they should."""
    return ChecksumError(
        f"{safe_url(what.uri)}, bytes {what.offset}..{what.offset + what.nbytes}: crc32c is {found:08x}, should be "
        f"{what.crc32c or 0:08x}{more}. Either the source or its manifest is wrong: compare them, then index again"
    )


def _hash(facts: list[str | int | None], nbytes: int) -> str:
    text = json.dumps(facts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=nbytes).hexdigest()


Write = Callable[[int, bytes], None]
"""Takes bytes of a download and where they belong; called in any order."""

Download = Callable[[Write], None]


@final
class NodeCache(Closing):
    """A folder of at most `limit` bytes that any number of processes share.

    Thread-safe. What came first stays: a cache smaller than the data serves its share of it. Each download looks at
    every file in the folder, so entries should be megabytes, as blocks and parts are.

    Args:
        folder: on a local disk; made if missing. Other users' files in it are left alone.
        limit: bytes, or a size such as ``"500 GB"``, for everything in the folder together.
        on_count: called with a name of ``counts`` and how much is added to it, by any thread.

    Raises:
        GraphError: ``limit`` is no size.
        DataError: the folder cannot be made or written to.

    Attributes:
        counts: what this handle has found and fetched: ``hits``, ``misses``, ``corrupt``, ``downloaded_nbytes``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit: int | str,
        on_count: Callable[[str, int], None] = lambda name, more: None,
    ) -> None:
        self.folder = os.path.abspath(path_of(folder, "NodeCache: folder"))
        self.limit = parse_bytes(limit, "NodeCache(limit=...)")
        self._waits = LockWaits()
        self._lock = concurrency.Lock()
        self.counts, self._on_count = Counter[str](), on_count
        self._verified: set[tuple[str, int]] = set()
        self._closed = False
        try:
            self._objects = os.path.join(self.folder, "objects")
            self._partial = os.path.join(self.folder, "partial")
            os.makedirs(self._objects, exist_ok=True)
            os.makedirs(self._partial, exist_ok=True)
            with self._space():  # of dead processes' downloads, and what is above a limit lower than before
                self._remove_from(self._partial)
                self._remove_from(self._objects, self.usage() - self.limit)
        except OSError as error:
            needs = (
                "whose file system has file locks" if error.errno in NO_LOCKS else "that can be written to"
            )
            raise DataError(
                f"NodeCache: the folder {self.folder!r} cannot be used ({error.strerror}): choose one {needs}, or "
                "leave cache= out"
            ) from error

    def usage(self) -> int:
        """Bytes on disk now: entries, and reserved space of downloads."""
        # What is downloaded moves on from `partial` meanwhile: looked at first there,
        # it is never missed, and by its inode not counted twice.
        sizes: dict[int, int] = {}
        for folder in (self._partial, self._objects):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        sizes[entry.inode()] = entry.stat(follow_symlinks=False).st_size
        return sum(sizes.values())

    def __contains__(self, what: Cacheable) -> bool:
        """Whether `open` would find it now; another process may remove it at any time."""
        return os.path.exists(self._path(what))

    def open(self, what: Cacheable) -> LocalFile | None:
        """The entry, or None if it is not there.

        The first time a process opens an entry its checksum is computed again, if
        it is known; an entry that fails is removed and counts as not there.

        Raises:
            OSError: the folder cannot be used any more.
        """
        path = self._path(what)
        while True:
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                # Waits at most for a removal's unlink or a download's rename.
                flock(fd, LOCK_SH)
                if not is_at(fd, path):
                    os.close(fd)
                    continue
                file = LocalFile(what.uri, fd)
            except BaseException:
                os.close(fd)
                raise
            if self._is_sound(what, file, fd):
                return file
            # Also under the locks of others that read it: what they have open stays theirs. But not what one of them
            # has fetched in its place.
            with file, contextlib.suppress(FileNotFoundError):
                if is_at(fd, path):
                    os.unlink(path)
            self._count(corrupt=1)
            return None

    def fetch(self, what: Cacheable, download: Download) -> LocalFile:
        """The entry, downloaded if it is not there; of all processes one downloads.

        Blocks while another process (or thread) downloads the same entry, and takes over if
        that one dies. `download` is called in this thread without any lock of this
        cache's state held, up to `DOWNLOADS` times if bytes do not match; a later call need not fetch again
        what an earlier one fetched intact.

        Raises:
            OSError (ENOSPC): limit or disk leave no room; read from the store instead.
            ChecksumError: the bytes never matched.
            LoaderClosedError: `close` was called.
        """
        while True:
            if file := self.open(what):
                self._count(hits=1)
                return file
            fd = self._own_partial(what)
            if fd is not None:
                file = self._fill(what, fd, download)
                self._count(misses=1)
                return file

    def close(self) -> None:
        """End all waits. Open files stay readable. Idempotent."""
        with self._lock:
            self._closed = True
        self._waits.close()

    def __reduce__(self) -> tuple[object, ...]:
        """A copy in another process is the same cache."""
        return NodeCache, (self.folder, self.limit)

    def __repr__(self) -> str:
        return f"<NodeCache {self.folder}: {format_bytes(self.usage())} of {format_bytes(self.limit)}>"

    # Downloads.

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                raise LoaderClosedError("the node cache is closed")

    def _path(self, what: Cacheable) -> str:
        return os.path.join(self._objects, what.name)

    def _own_partial(self, what: Cacheable) -> int | None:
        """An exclusively locked file to download to, or None if the entry may be there by now."""
        path = os.path.join(self._partial, what.name)
        self._check_open()
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_exclusive(fd):
                # Shared, not exclusive: many waiters then get it at once, and none
                # keeps the owner, who reads on under a shared lock, from them.
                try:
                    self._waits.shared(fd)
                except LoaderClosedError:
                    fd = -1  # the wait closes it
                    raise
                # The owner is done or dead. If it died, one of its waiters gets this.
                if not is_at(fd, path) or not try_exclusive(fd):
                    os.close(fd)
                    return None
            if is_at(fd, path) and not os.path.exists(self._path(what)):
                return fd
            if is_at(fd, path):
                os.unlink(path)
            os.close(fd)
            return None
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise

    def _fill(self, what: Cacheable, fd: int, download: Download) -> LocalFile:
        """Fetch an entry, and make it visible; readers of other processes wait for its lock to become shared."""
        there = os.path.join(self._partial, what.name)
        file = LocalFile(what.uri, fd)
        try:
            self._reserve(what, fd)
            file.size = what.nbytes
            for left in reversed(range(DOWNLOADS)):
                download(partial(self._write, fd))
                if what.crc32c is None or (found := file_crc32c(file, 0, what.nbytes)) == what.crc32c:
                    break
                self._count(corrupt=1)
                if not left:
                    raise mismatch(what, found, f", after {DOWNLOADS} downloads")
            with self._lock:
                self._verified.add((what.name, os.fstat(fd).st_ino))
            os.fsync(fd)
            os.rename(there, self._path(what))
            sync_folder(self._objects)
            # Not atomic: it may be removed in between, and this file stays readable all the same.
            flock(fd, LOCK_SH)
        except BaseException:
            if is_at(fd, there):
                os.unlink(there)
            file.close()
            raise
        self._count(downloaded_nbytes=what.nbytes)
        return file

    def _write(self, fd: int, offset: int, data: bytes) -> None:
        self._check_open()
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def _is_sound(self, what: Cacheable, file: LocalFile, fd: int) -> bool:
        if file.size != what.nbytes:
            return False
        if what.crc32c is None:
            return True
        identity = (what.name, os.fstat(fd).st_ino)
        with self._lock:
            if identity in self._verified:
                return True
        if file_crc32c(file, 0, file.size) != what.crc32c:
            return False
        with self._lock:
            self._verified.add(identity)
        return True

    def _count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)
        for name, count in more.items():
            self._on_count(name, count)

    # Space.

    @contextlib.contextmanager
    def _space(self) -> Iterator[None]:
        """Of all processes, only this thread makes room and reserves it."""
        fd = os.open(os.path.join(self.folder, "space.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            flock(fd, LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _reserve(self, what: Cacheable, fd: int) -> None:
        """Claim an entry's bytes on disk: `fd` is of its file in ``partial/``, which the caller has locked.

        Raises:
            OSError (ENOSPC): there is no room. What came first stays.
        """
        with self._space():
            for name in os.listdir(self._objects):
                # Another version of the same bytes will not be asked for again.
                if name.startswith(what.place) and name != what.name:
                    self._remove(os.path.join(self._objects, name))
            mine = os.fstat(fd).st_size
            need = self.usage() - mine + what.nbytes - self.limit
            if need > 0 and need > self._remove_from(self._partial, need):
                limit, used = format_bytes(self.limit), format_bytes(self.usage())
                raise OSError(
                    errno.ENOSPC,
                    f"no room for {format_bytes(what.nbytes)} in the node cache (limit {limit}, used {used}). Raise "
                    "NodeCache(limit=...), or remove entries that are not used any more",
                    self.folder,
                )
            # The file's full length is reserved, so that others see it as used.
            if hasattr(os, "posix_fallocate"):  # not on macOS, where a full disk is noticed later
                os.posix_fallocate(fd, 0, max(1, what.nbytes))
            os.ftruncate(fd, what.nbytes)

    def _remove_from(self, folder: str, need: float = math.inf) -> int:
        """Remove files whose lock nobody holds until `need` bytes are free; the bytes freed."""
        freed = 0
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if freed >= need:
                break
            with contextlib.suppress(FileNotFoundError):
                nbytes = os.stat(path).st_size
                if self._remove(path):
                    freed += nbytes
        return freed

    def _remove(self, path: str) -> bool:
        """Unlink a file unless someone holds its lock."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            if try_exclusive(fd) and is_at(fd, path):
                os.unlink(path)
                return True
            return False
        finally:
            os.close(fd)
