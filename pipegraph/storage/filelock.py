"""``flock`` on open files, with a cancellable wait; and journals, files under such a lock.

The kernel ends these locks with their process, however that ends: nothing is
ever left locked. Locks belong to the open file, so threads exclude each other too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from pipegraph import concurrency
from pipegraph.closing import Closing
from pipegraph.errors import DataError, LoaderClosedError

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


class Journal(Closing):
    """A file of JSON objects, one line each, under an exclusive lock that ends with its process."""

    def __init__(self, path: str | os.PathLike[str], refusal: str) -> None:
        self._path = Path(path)
        while not self._opened(refusal):
            pass  # its process has ended meanwhile, and removed it
        self._file.seek(0)
        # A line that a killed process was writing is cut short and left out.
        self.records: list[dict[str, Any]] = []
        for line in self._file.read().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                self.records.append(dict(json.loads(line)))
        self._file.write(b"\n")

    def _opened(self, refusal: str) -> bool:
        """Open and lock the file; returns whether it is still the one that lies there."""
        self._file = open(self._path, "a+b")  # noqa: SIM115  close() closes it
        locked = False
        try:
            if not try_exclusive(self._file.fileno()):
                raise DataError(refusal)
            locked = is_at(self._file.fileno(), os.fspath(self._path))
        except OSError as error:
            if error.errno in NO_LOCKS and not os.fstat(self._file.fileno()).st_size:
                self.remove()
            raise
        finally:
            if not locked:
                self._file.close()
        return locked

    def fileno(self) -> int:
        return self._file.fileno()

    def note(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()
