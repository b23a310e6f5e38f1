"""All of a file at once."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from pipegraph.errors import DataError, shown
from pipegraph.paths import PATHS, TO_READ


def read_file(path: Any) -> bytes:
    """All of a regular file; in four system calls, during each of which another thread may take the interpreter."""
    if not isinstance(path, PATHS):  # a number is an open file of another's
        raise DataError(f"Load: a sample's 'path' must be a path, got {shown(path)}")
    file = os.open(path, TO_READ)
    try:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        # Before it is read: of a pipe there is what was written so far, and a device may have no end.
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"Load: {os.fspath(path)!r} is no regular file (a pipe or a device)")
        content = os.read(file, status.st_size + 1)
        # A file that grows, one of /proc, and one larger than the system reads at once.
        if len(content) != status.st_size:
            parts = [content]
            while parts[-1]:
                parts.append(os.read(file, 1 << 20))
            content = b"".join(parts)
    finally:
        os.close(file)
    return content
