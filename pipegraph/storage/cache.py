"""The node cache: parts and blocks on a local disk, shared by all ranks of a node.

What holds at every moment, whoever is killed:

- A file under ``objects/`` is whole, and its bytes had the right size and checksum
  when it was renamed to there; it is never written to again.
- A file under ``partial/`` belongs to the one process that holds its exclusive
  lock; without a lock it is a dead process's, and anyone may take it over.
- Readers hold a shared lock on the file they read. Who wants to remove one takes
  the exclusive lock without waiting, and leaves it alone if that fails.
- Usage is the sum of what lies in the folder, so that no counter can be wrong. Space is made and
  reserved under the lock of ``space.lock``, which is never held over a download.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Protocol, final

from pipegraph.errors import ChecksumError, DataError, LoaderClosedError
from pipegraph.units import format_bytes, parse_bytes

from .checksum import file_crc32c
from .eviction import CacheEntry, NextUse, eviction_order
from .filelock import LockWaits, is_at, try_exclusive
from .files import LocalFile, ShardFile
from .manifest import sync_folder

# One, and three more after bytes that do not match: at one bad transfer in five, two in
# a thousand entries are given up.
DOWNLOADS: Final = 4

_SOLE: Final = ".sole"


@dataclass(frozen=True)
class Cacheable:
    """What may be cached: a range of a part.

    Args:
        uri: of the part.
        nbytes: length of the range.
        offset: first byte of the range in the part.
        part_nbytes: size of the part, if known.
        version: the store's etag, if known.
        crc32c: of the range's bytes, if known.
        sole: it exists nowhere else: never evicted.
    """

    uri: str
    nbytes: int
    offset: int = 0
    part_nbytes: int | None = None
    version: str | None = None
    crc32c: int | None = None
    sole: bool = False

    @cached_property
    def name(self) -> str:
        """The entry's file name: a hash, so that nothing of a URI reaches the file system."""
        facts = [self.uri, self.offset, self.nbytes, self.part_nbytes, self.version, self.crc32c]
        text = json.dumps(facts).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=20).hexdigest() + (_SOLE if self.sole else "")


class Sink(Protocol):
    """Where a download puts its bytes; any thread, any order, each byte once or more."""

    def write_at(self, offset: int, data: bytes) -> None: ...


Download = Callable[[Sink], None]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Of this `NodeCache`, since it was made. Usage is on disk: see `NodeCache.usage`."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    corrupt: int = 0
    downloaded_nbytes: int = 0


@final
class CachedFile(ShardFile):
    """An entry that is open for reading, and cannot be evicted until it is closed."""

    def __init__(self, name: str, fd: int) -> None:
        self._file = LocalFile.of(fd, name)
        self.name, self.size = name, self._file.size

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_at(offset, nbytes)

    def close(self) -> None:
        self._file.close()  # and with it the shared lock


@final
class NodeCache:
    """A folder of at most `limit` bytes that any number of processes share.

    Any thread may call anything. Making room looks at every file in the folder, so
    entries should be megabytes, as blocks and parts are.

    Args:
        folder: on a local disk; made if missing. Other users' files in it are left alone.
        limit: bytes, or a size such as ``"500 GB"``, for everything in the folder together.
        next_use: steps until an entry's next use (`UsePlan.next_use`), for eviction;
            without it the least recently used entry goes first.
    """

    def __init__(
        self, folder: str | os.PathLike[str], limit: int | str, *, next_use: NextUse | None = None
    ) -> None:
        self.folder = os.path.abspath(folder)
        self.limit = parse_bytes(limit, "NodeCache(limit=...)")
        self._next_use: NextUse = next_use or (lambda name: math.inf)
        self._objects, self._partial, self._quarantine = (
            os.path.join(self.folder, name) for name in ("objects", "partial", "quarantine")
        )
        for path in (self._objects, self._partial, self._quarantine):
            os.makedirs(path, exist_ok=True)
        self._waits = LockWaits()
        self._lock = threading.Lock()
        self._stats = CacheStats()
        self._verified: set[tuple[str, int]] = set()
        self._closed = False
        with self._space():
            self._remove_dead()
            self._shrink()

    def plan(self, next_use: NextUse) -> None:
        """Use another plan for eviction from now on."""
        with self._lock:
            self._next_use = next_use

    @property
    def stats(self) -> CacheStats:
        with self._lock:
            return self._stats

    def usage(self) -> int:
        """Bytes on disk now: entries, reserved space of downloads, quarantine."""
        # What is downloaded moves on from `partial` meanwhile: looked at first there,
        # it is never missed, and by its inode not counted twice.
        sizes: dict[int, int] = {}
        for folder in (self._partial, self._objects, self._quarantine):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        sizes[entry.inode()] = entry.stat(follow_symlinks=False).st_size
        return sum(sizes.values())

    def __contains__(self, what: Cacheable) -> bool:
        """Whether it is there now; another process may remove it at any time."""
        return os.path.exists(os.path.join(self._objects, what.name))

    def open(self, what: Cacheable) -> CachedFile | None:
        """The entry, or None if it is not there.

        The first time a process opens an entry its checksum is computed again, if
        it is known; an entry that fails is removed and counts as not there.
        """
        path = os.path.join(self._objects, what.name)
        while True:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                # Waits at most for an eviction's unlink or a download's rename.
                fcntl.flock(fd, fcntl.LOCK_SH)
                if not is_at(fd, path):
                    os.close(fd)
                    continue
                with contextlib.suppress(PermissionError):  # another user's entry
                    os.utime(fd)
                file = CachedFile(what.uri, fd)
            except BaseException:
                os.close(fd)
                raise
            if self._is_sound(what, file, fd):
                return file
            file.close()
            self._count(corrupt=1)
            self._remove(path)
            return None

    def fetch(self, what: Cacheable, download: Download) -> CachedFile:
        """The entry, downloaded if it is not there; of all processes one downloads.

        Blocks while another process (or thread) downloads the same entry, and takes over if
        that one dies. `download` is called in this thread without any lock of this
        cache's state held, up to `DOWNLOADS` times if bytes do not match.

        Raises:
            OSError (ENOSPC): limit or disk leave no room, since everything there is being
                read, is needed sooner, or is the only copy; read from the store instead.
            ChecksumError: the bytes never matched; the last ones lie in ``quarantine/``.
            LoaderClosedError: `close` was called.
        """
        missed = False
        while True:
            if file := self.open(what):
                if not missed:
                    self._count(hits=1)
                return file
            if not missed:
                self._count(misses=1)
            missed = True
            fd = self._own_partial(what)
            if fd is None:
                continue
            if file := self._fill(what, fd, download):
                return file

    def put(self, what: Cacheable, data: bytes) -> None:
        """Store bytes that are at hand. Raises as `fetch` does."""
        self.fetch(what, lambda sink: sink.write_at(0, data)).close()

    def remove(self, what: Cacheable) -> bool:
        """Remove an entry, also an only copy; False if it is being read or not there."""
        return self._remove(os.path.join(self._objects, what.name))

    def close(self) -> None:
        """End all waits. Open files stay readable. Idempotent."""
        with self._lock:
            self._closed = True
        self._waits.close()

    def __enter__(self) -> NodeCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """A copy in another process is the same cache; it gets its plan there."""
        return NodeCache, (self.folder, self.limit)

    def __repr__(self) -> str:
        used, stats = self.usage(), self.stats
        return (
            f"<NodeCache {self.folder}: {format_bytes(used)} of {format_bytes(self.limit)}, "
            f"{stats.hits} hits, {stats.misses} misses>"
        )

    # Downloads.

    def _own_partial(self, what: Cacheable) -> int | None:
        """An exclusively locked file to download to, or None if the entry may be there by now."""
        path = os.path.join(self._partial, what.name)
        with self._lock:
            if self._closed:
                raise LoaderClosedError("the node cache is closed")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
            if is_at(fd, path) and not os.path.exists(os.path.join(self._objects, what.name)):
                return fd
            if is_at(fd, path):
                os.unlink(path)
            os.close(fd)
            return None
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise

    def _fill(self, what: Cacheable, fd: int, download: Download) -> CachedFile | None:
        partial, final_path = (os.path.join(f, what.name) for f in (self._partial, self._objects))
        renamed = False
        try:
            for left in reversed(range(DOWNLOADS)):
                with self._space():
                    self._reserve(what, fd)
                sink = _FdSink(fd, what.nbytes)
                download(sink)
                if found := self._mismatch(what, fd, sink):
                    if not left:
                        self._to_quarantine(what, partial, found)
                    os.ftruncate(fd, 0)
                    continue
                break
            os.fsync(fd)
            os.rename(partial, final_path)
            renamed = True
            sync_folder(self._objects)
            self._count(downloaded_nbytes=what.nbytes)
            with self._lock:
                self._verified.add((what.name, os.fstat(fd).st_ino))
            # The conversion is not atomic: an eviction may come between.
            fcntl.flock(fd, fcntl.LOCK_SH)
            if is_at(fd, final_path):
                return CachedFile(what.uri, fd)
        except BaseException:
            if not renamed and is_at(fd, partial):
                os.unlink(partial)
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _mismatch(self, what: Cacheable, fd: int, sink: _FdSink) -> str | None:
        """What is wrong with downloaded bytes, read back from the file."""
        if sink.written < what.nbytes:
            return f"{sink.written} of {what.nbytes} bytes came"
        if what.crc32c is not None:
            crc = file_crc32c(_FdView(fd, what), 0, what.nbytes)
            if crc != what.crc32c:
                self._count(corrupt=1)
                return f"crc32c is {crc:08x}, should be {what.crc32c:08x}"
        return None

    def _to_quarantine(self, what: Cacheable, partial: str, found: str) -> None:
        path = os.path.join(self._quarantine, what.name)
        os.rename(partial, path)
        raise ChecksumError(
            f"{what.uri}, bytes {what.offset}..{what.offset + what.nbytes}: {found}, after {DOWNLOADS} "
            f"downloads. The last bytes lie in {path!r}. Either the source or its manifest is wrong: compare "
            "them, then index again"
        )

    def _is_sound(self, what: Cacheable, file: CachedFile, fd: int) -> bool:
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

    # Space; these run under `_space`.

    @contextlib.contextmanager
    def _space(self) -> Iterator[None]:
        fd = os.open(os.path.join(self.folder, "space.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _reserve(self, what: Cacheable, fd: int) -> None:
        """Make room for an entry and claim it on disk."""
        with self._lock:
            next_use = self._next_use
        mine = os.fstat(fd).st_size
        need = self.usage() - mine + what.nbytes - self.limit
        if need > 0:
            need -= self._remove_dead(except_fd=fd)
        leftovers = iter(_scan(self._quarantine))
        # Nothing is waited for that is not in the plan, and nothing in it: 0.
        incoming = next_use(what.name)
        order = iter(
            eviction_order(_scan(self._objects), next_use, 0.0 if incoming == math.inf else incoming)
        )
        while True:
            while need > 0:
                need -= self._evict_next(leftovers, order, what)
            try:
                # The file's full length is reserved, so that others see it as used.
                os.posix_fallocate(fd, 0, max(1, what.nbytes))
                os.ftruncate(fd, what.nbytes)
                return
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                os.ftruncate(fd, 0)
                need = 1  # others fill this disk: the limit is lower than it says

    def _shrink(self) -> None:
        """After a start with a lower limit than before."""
        over = self.usage() - self.limit
        for entry in eviction_order(_scan(self._objects), self._next_use):
            if over > 0 and self._remove(os.path.join(self._objects, entry.name)):
                over -= entry.nbytes

    def _evict_next(
        self, leftovers: Iterator[CacheEntry], order: Iterator[CacheEntry], what: Cacheable
    ) -> int:
        """Remove the first file that nobody reads; the bytes freed."""
        for folder, entries in ((self._quarantine, leftovers), (self._objects, order)):
            for entry in entries:
                if self._remove(os.path.join(folder, entry.name)):
                    if folder is self._objects:
                        self._count(evicted=1)
                    return entry.nbytes
        limit, used = format_bytes(self.limit), format_bytes(self.usage())
        raise OSError(
            errno.ENOSPC,
            f"no room for {format_bytes(what.nbytes)} in the node cache (limit {limit}, used {used}): "
            "what is there is being read, is needed sooner, or is the only copy. Raise "
            "NodeCache(limit=...), free the disk, or use smaller blocks",
            self.folder,
        )

    def _remove_dead(self, except_fd: int | None = None) -> int:
        """Remove downloads whose process is gone; the bytes freed."""
        freed = 0
        for entry in _scan(self._partial):
            path = os.path.join(self._partial, entry.name)
            if (except_fd is None or not is_at(except_fd, path)) and self._remove(path):
                freed += entry.nbytes
        return freed

    def _remove(self, path: str) -> bool:
        """Unlink a file unless someone holds its lock."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if try_exclusive(fd) and is_at(fd, path):
                os.unlink(path)
                return True
            return False
        finally:
            os.close(fd)

    def _count(self, **more: int) -> None:
        with self._lock:
            now = {key: getattr(self._stats, key) + n for key, n in more.items()}
            self._stats = replace(self._stats, **now)


def _scan(folder: str) -> list[CacheEntry]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Another process may remove it between the two.
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append(
                    CacheEntry(entry.name, status.st_size, status.st_mtime_ns, entry.name.endswith(_SOLE))
                )
    return found


@dataclass
class _FdSink:
    """Writes to an open file, and counts what was covered from the start without a gap."""

    fd: int
    nbytes: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _spans: dict[int, int] = field(default_factory=dict)
    written: int = 0
    """Every byte below this has come."""

    def write_at(self, offset: int, data: bytes) -> None:
        if offset < 0 or offset + len(data) > self.nbytes:
            raise DataError(
                f"download wrote bytes {offset}..{offset + len(data)} of an entry of {self.nbytes}"
            )
        view, at = memoryview(data), offset
        while view:
            written = os.pwrite(self.fd, view, at)
            view, at = view[written:], at + written
        with self._lock:
            self._spans[offset] = max(self._spans.get(offset, 0), at)
            while True:
                reached = [s for s in self._spans if s <= self.written]
                if not reached:
                    return
                for start in reached:
                    self.written = max(self.written, self._spans.pop(start))


@final
class _FdView(ShardFile):
    """A file under construction, for checking it."""

    def __init__(self, fd: int, what: Cacheable) -> None:
        self._fd, self.name, self.size = fd, what.uri, what.nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self._fd, nbytes, offset)

    def close(self) -> None:
        pass
