"""A file that checksums its bytes as they are written."""

from __future__ import annotations

import io
import os
from typing import Any

from pipegraph.storage.checksum import crc32c_extend

_PIECE_NBYTES = 1 << 20


class ChecksumFile(io.RawIOBase):
    """A new file, written in pieces of a megabyte.

    Attributes:
        crc32c: of what was written, after :meth:`flush`.
        nbytes: written so far.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._extend = crc32c_extend()
        self._pieces: list[bytes] = []
        self._held = 0
        self.crc32c = 0
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.nbytes

    def write(self, data: Any) -> int:
        piece = data if isinstance(data, bytes) else bytes(data)
        self.write_pieces([piece], len(piece))
        return len(piece)

    def write_pieces(self, pieces: list[bytes], nbytes: int) -> None:
        """Write several pieces, given their total number of bytes."""
        self._pieces += pieces
        self._held += nbytes
        self.nbytes += nbytes
        if self._held >= _PIECE_NBYTES:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        data = b"".join(self._pieces)
        self._pieces, self._held = [], 0
        self.crc32c = self._extend(self.crc32c, data)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:  # a full disk, which does not say which
            error.filename = self._path
            raise

    def sync(self) -> None:
        """Everything written is on the disk."""
        self.flush()
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        self._pieces, self._held = [], 0  # `RawIOBase.close` flushes
        if fd >= 0:
            os.close(fd)
        super().close()
