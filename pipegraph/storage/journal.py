"""What a process notes of its work, so that another one can continue it after a stop."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from pipegraph.closing import Closing
from pipegraph.errors import DataError

from .filelock import NO_LOCKS, try_exclusive


class Journal(Closing):
    """A file of JSON objects, one line each, under an exclusive lock that ends with its process."""

    def __init__(self, path: str | os.PathLike[str], refusal: str) -> None:
        self._path = Path(path)
        self._file = open(path, "a+b")  # noqa: SIM115  close() closes it
        try:
            if not try_exclusive(self._file.fileno()):
                raise DataError(refusal)
        except OSError as error:
            if error.errno in NO_LOCKS and not os.fstat(self._file.fileno()).st_size:
                self.remove()
            self._file.close()
            raise
        except DataError:
            self._file.close()
            raise
        self._file.seek(0)
        # A line that a killed process was writing is cut short and left out.
        self.records: list[dict[str, Any]] = []
        for line in self._file.read().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                self.records.append(dict(json.loads(line)))
        self._file.write(b"\n")

    def fileno(self) -> int:
        return self._file.fileno()

    def note(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()
