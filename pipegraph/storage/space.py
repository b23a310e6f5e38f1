"""Disk space of a node cache: used, reserved, evicted.

Usage is the sum of what lies in the folder, so that no counter can be wrong. Space is made and reserved under the
lock of ``space.lock``, which is never held over a download or a sync.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from pipegraph.storage.entries import Cacheable, place_of
from pipegraph.storage.filelock import LOCK_EX, flock, is_at, try_exclusive
from pipegraph.units import format_bytes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk says that takes no more of this user's bytes: it is full, or the user's quota is."""


class Space:
    """The folder of a `NodeCache`; any number of processes share it. Thread-safe."""

    def __init__(self, folder: str, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.objects, self.partial, self.quarantine = (
            os.path.join(folder, name) for name in ("objects", "partial", "quarantine")
        )
        for path in (self.objects, self.partial, self.quarantine):
            os.makedirs(path, exist_ok=True)
        self.evicted = 0

    def usage(self) -> int:
        """Bytes on disk now: entries, reserved space of downloads, quarantine."""
        # What is downloaded moves on from `partial` meanwhile: looked at first there,
        # it is never missed, and by its inode not counted twice.
        sizes: dict[int, int] = {}
        for folder in (self.partial, self.objects, self.quarantine):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        sizes[entry.inode()] = entry.stat(follow_symlinks=False).st_size
        return sum(sizes.values())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Of all processes, only this thread makes room and reserves it."""
        fd = os.open(os.path.join(self.folder, "space.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            flock(fd, LOCK_EX)
            yield
        finally:
            os.close(fd)

    def tidy(self, next_use: NextUse) -> None:
        """At a start: remove dead processes' downloads, and what is above a limit lower than before."""
        with self.locked():
            self._remove_dead()
            over = self.usage() - self.limit
            for entry in eviction_order(_scan(self.objects), next_use):
                if over > 0 and self.remove(os.path.join(self.objects, entry.name)):
                    over -= entry.nbytes

    def reserve(self, what: Cacheable, fd: int, next_use: NextUse) -> None:
        """Make room for an entry and claim it on disk: `fd` is of its file in ``partial/``, which the caller has
        locked.

        Raises:
            OSError (ENOSPC): nothing more may go.
        """
        with self.locked():
            there = []
            for entry in _scan(self.objects):
                # Another version of the same bytes will not be asked for again.
                old = place_of(entry.name) == what.place and entry.name != what.name
                if not old or not self.remove(os.path.join(self.objects, entry.name)):
                    there.append(entry)
            mine = os.fstat(fd).st_size
            need = self.usage() - mine + what.nbytes - self.limit
            if need > 0:
                need -= self._remove_dead(except_fd=fd)
            # Nothing is waited for that is not in the plan, and nothing in it: 0.
            incoming = next_use(what.name)
            order = eviction_order(there, next_use, 0.0 if incoming == math.inf else incoming)
            spare = chain(
                ((self.quarantine, entry) for entry in _scan(self.quarantine)),
                ((self.objects, entry) for entry in order),
            )
            while True:
                while need > 0:
                    need -= self._evict_next(spare, what)
                try:
                    # The file's full length is reserved, so that others see it as used.
                    if hasattr(os, "posix_fallocate"):  # not on macOS, where a full disk is noticed later
                        os.posix_fallocate(fd, 0, max(1, what.nbytes))
                    os.ftruncate(fd, what.nbytes)
                    return
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    os.ftruncate(fd, 0)
                    need = 1  # others fill this disk: the limit is lower than it says

    def _evict_next(self, spare: Iterator[tuple[str, CacheEntry]], what: Cacheable) -> int:
        """Remove the first file that nobody reads; the bytes freed."""
        for folder, entry in spare:
            if self.remove(os.path.join(folder, entry.name)):
                self.evicted += folder == self.objects
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
        for entry in _scan(self.partial):
            path = os.path.join(self.partial, entry.name)
            if (except_fd is None or not is_at(except_fd, path)) and self.remove(path):
                freed += entry.nbytes
        return freed

    def remove(self, path: str) -> bool:
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


def _scan(folder: str) -> list[CacheEntry]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Another process may remove it between the two.
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append(CacheEntry(entry.name, status.st_size, status.st_mtime_ns))
    return found


NextUse = Callable[[str], float]
"""Steps until an entry is used next; ``math.inf`` if never or unknown."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file in a cache folder, as found there; ``used_ns``: when it was opened last, by the wall clock."""

    name: str
    nbytes: int
    used_ns: int


def eviction_order(
    entries: Iterable[CacheEntry], next_use: NextUse, incoming: float = 0.0
) -> list[CacheEntry]:
    """The entries that may go, first to go first.

    The one whose next use lies farthest ahead (Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966), among those never used again the least recently used. One needed no later than the incoming entry
    (0 if that is waited for) stays: making room for a far prefetch at its cost would only move the miss forward.
    """
    uses = [(next_use(e.name), e) for e in entries]
    may_go = [(use, e) for use, e in uses if use == math.inf or use > incoming]
    may_go.sort(key=lambda pair: (-pair[0], pair[1].used_ns, pair[1].name))
    return [e for _, e in may_go]
