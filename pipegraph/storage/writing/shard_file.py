"""One shard being written: temporary name, checksum, fsync, rename."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pipegraph.errors import DataError, note
from pipegraph.storage.formats import format_of
from pipegraph.storage.indexing import index_part
from pipegraph.storage.manifest import PartIndex, sync_folder
from pipegraph.storage.parts import Part
from pipegraph.storage.shard_files import LocalFile

from .checksum_file import ChecksumFile
from .encoder import Encoder, Sample

PARTIAL = ".partial-"
"""In the name of what is not finished."""


class OpenShard:
    """A shard that is being written; :meth:`finish` gives it its name, :meth:`abandon` leaves no trace of it.

    Args:
        path: its name when it is finished.
    """

    def __init__(self, path: str, encoder: Encoder) -> None:
        folder, name = os.path.split(path)
        self._path, self._encoder = path, encoder
        self._temporary = os.path.join(folder, f".{name}{PARTIAL}{os.getpid()}")
        Path(self._temporary).unlink(missing_ok=True)  # of an earlier process with the same number
        self._file = ChecksumFile(self._temporary)
        encoder.begin(self._file)

    def finish(self) -> PartIndex:
        """The shard is complete, and on the disk.

        Raises:
            OSError: there is no room, or the disk fails.
        """
        try:
            self._file.flush()
            crc, nbytes = self._file.crc32c, self._file.nbytes
            blocks = self._encoder.finish()
            self._file.sync()
            part = Part(self._path, self._file.nbytes)
            if blocks is not None and [(b.offset, b.nbytes) for b in blocks] == [(0, nbytes)]:
                index = PartIndex(part, blocks, self._file.crc32c, (crc,))
            else:
                with LocalFile(self._temporary) as file:
                    index = index_part(part, file, format_of(part))
            os.replace(self._temporary, self._path)
        finally:
            self.abandon()
        sync_folder(os.path.dirname(self._path))
        return index

    def abandon(self) -> None:
        """Remove what was written, if it was not finished."""
        self._file.close()
        Path(self._temporary).unlink(missing_ok=True)


def write_shard(path: str, encoder: Encoder, samples: Iterable[tuple[int, Sample]]) -> PartIndex:
    """A whole shard.

    Args:
        samples: with their numbers in the data set.

    Raises:
        DataError: a sample cannot be written; a note says which.
    """
    shard, number = OpenShard(path, encoder), -1
    try:
        for number, sample in samples:
            encoder.add(encoder.encode(sample, number))
    except BaseException as error:
        if isinstance(error, DataError):
            note(error, f"sample {number} of the source, in {os.path.basename(path)}")
        shard.abandon()
        raise
    return shard.finish()
