"""``flock`` on open files, with a cancellable wait.

The kernel ends these locks with their process, however that ends: nothing is
ever left locked. Locks belong to the open file, so threads exclude each other too.
"""

from __future__ import annotations

import contextlib
import errno
import os
from concurrent.futures import CancelledError, Future

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
    return os.path.samestat(os.fstat(fd), there)


class LockWaits:
    """Waits for shared locks; `close` ends them all."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._waits = set[Future[None]]()
        self._closed = False

    def shared(self, fd: int) -> None:
        """Wait for the shared lock of `fd`; after a LoaderClosedError `fd` is closed as soon as the lock comes."""
        with contextlib.suppress(BlockingIOError):
            return flock(fd, LOCK_SH | LOCK_NB)
        granted = Future[None]()
        # A blocking flock cannot be interrupted: a thread of its own waits in it, and
        # ends when the holder does (at the latest with the holder's process).
        wait = concurrency.Thread(target=_wait, args=(fd, granted), name="pipegraph-cache-lock", daemon=True)
        with self._lock:
            self._waits.add(granted)
            if self._closed:
                granted.cancel()
        wait.start()
        try:
            granted.result()
        except CancelledError:
            raise LoaderClosedError(
                "the node cache was closed while another process downloaded an entry"
            ) from None
        finally:
            with self._lock:
                self._waits.discard(granted)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for wait in self._waits:
                wait.cancel()


def _wait(fd: int, granted: Future[None]) -> None:
    error = None
    try:
        flock(fd, LOCK_SH)
    except OSError as caught:
        error = caught
    if not granted.set_running_or_notify_cancel():
        os.close(fd)
    elif error is not None:
        granted.set_exception(error)
    else:
        granted.set_result(None)
