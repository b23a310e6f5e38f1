"""What a process notes of its work, so that another one can continue it after a stop."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from pipegraph.closing import Closing
from pipegraph.errors import DataError

from .filelock import NO_LOCKS, is_at, try_exclusive


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
