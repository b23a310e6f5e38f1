"""Disk space of a node cache: used and reserved. A full cache keeps what came first.

Usage is the sum of what lies in the folder, so that no counter can be wrong. Space is made and reserved under the
lock of ``space.lock``, which is never held over a download or a sync.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator

from pipegraph.storage.entries import Cacheable
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

    def tidy(self) -> None:
        """At a start: remove dead processes' downloads, and what is above a limit lower than before."""
        with self.locked():
            self._remove_from(self.partial)
            self._remove_from(self.objects, self.usage() - self.limit)

    def reserve(self, what: Cacheable, fd: int) -> None:
        """Claim an entry's bytes on disk: `fd` is of its file in ``partial/``, which the caller has locked.

        Raises:
            OSError (ENOSPC): there is no room. What came first stays.
        """
        with self.locked():
            for name in os.listdir(self.objects):
                # Another version of the same bytes will not be asked for again.
                if name.startswith(what.place) and name != what.name:
                    self.remove(os.path.join(self.objects, name))
            mine = os.fstat(fd).st_size
            need = self.usage() - mine + what.nbytes - self.limit
            for folder in (self.partial, self.quarantine):
                if need > 0:
                    need -= self._remove_from(folder, need, except_fd=fd)
            if need > 0:
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

    def _remove_from(self, folder: str, need: float = math.inf, except_fd: int | None = None) -> int:
        """Remove files whose lock nobody holds until `need` bytes are free; the bytes freed."""
        freed = 0
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if freed >= need:
                break
            with contextlib.suppress(FileNotFoundError):
                nbytes = os.stat(path).st_size
                if (except_fd is None or not is_at(except_fd, path)) and self.remove(path):
                    freed += nbytes
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
