"""``flock`` on open files, with a cancellable wait.

The kernel ends these locks with their process, however that ends: nothing is
ever left locked. Locks belong to the open file, so threads exclude each other too.
"""

from __future__ import annotations

import errno
import os

from pipegraph import concurrency
from pipegraph.errors import LoaderClosedError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_SH, LOCK_EX, LOCK_NB = 1, 2, 4
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems without locks answer, such as Lustre mounted without ``flock`` and some NFS."""


def flock(fd: int, operation: int) -> None:
    """``flock``; where the system has none, the error of a file system without locks."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no flock")
    fcntl.flock(fd, operation)


def exclusive(fd: int) -> bool:
    """Wait for the exclusive lock; False where the file system has none."""
    try:
        flock(fd, LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def try_exclusive(fd: int) -> bool:
    """Take the exclusive lock if that is possible at once. A shared one held before is given up."""
    try:
        flock(fd, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(fd: int, path: str) -> bool:
    """Whether an open file is the one that lies at `path` now."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


class LockWaits:
    """Waits for shared locks; `close` ends them all."""

    def __init__(self) -> None:
        self._changed = concurrency.Condition()
        self._closed = False

    def shared(self, fd: int) -> None:
        """Wait for the shared lock of `fd`; after a LoaderClosedError `fd` is closed as soon as the lock comes."""
        try:
            flock(fd, LOCK_SH | LOCK_NB)
            return
        except BlockingIOError:
            pass
        # A blocking flock cannot be interrupted: a thread of its own waits in it, and
        # ends when the holder does (at the latest with the holder's process).
        wait = _Wait(fd, self._changed)
        concurrency.Thread(target=wait.run, name="pipegraph-cache-lock", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: wait.done or self._closed)
            if not wait.done:
                wait.abandoned = True
                raise LoaderClosedError("the node cache was closed while another process downloaded an entry")
        if wait.error:
            raise wait.error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _Wait:
    def __init__(self, fd: int, changed: concurrency.Condition) -> None:
        self._fd, self._changed = fd, changed
        self.done = self.abandoned = False
        self.error: OSError | None = None

    def run(self) -> None:
        error = None
        try:
            flock(self._fd, LOCK_SH)
        except OSError as caught:
            error = caught
        with self._changed:
            self.done, self.error = True, error
            abandoned = self.abandoned
            self._changed.notify_all()
        if abandoned:
            os.close(self._fd)
