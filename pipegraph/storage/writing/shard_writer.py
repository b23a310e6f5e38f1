"""``pg.ShardWriter``: shards written from the user's own loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from pipegraph.errors import DataError, LoaderClosedError, note
from pipegraph.storage.indexing import index_part
from pipegraph.storage.manifest import Manifest, PartIndex, sync_folder
from pipegraph.storage.parts import Part
from pipegraph.storage.shard_files import LocalFile
from pipegraph.units import parse_bytes

from .encoders import Encoder, encoder_of
from .pack_folder import PARTIAL, PackFolder

SIZE = "128 MB"
"""Of a shard: large enough that requests to a store do not count."""


_PIECE_NBYTES = 1 << 20


STREAM = "stream"
"""The ``source`` of what cannot be continued: it is written again from its start."""


@final
class ShardWriter:
    """Writes samples to shards of about one size, with a manifest of all of them at the end.

    A loop that was stopped resumes: give a writer on the same folder the samples from number ``written`` on::

        with pg.ShardWriter("shards", format="tar") as writer:
            for sample in itertools.islice(samples(), writer.written, None):
                writer.write(sample)

    Samples are dicts. ``"key"`` names a sample, else its number does. In a tar each other field is a file
    ``KEY.FIELD``: bytes as they are, text, arrays as ``.npy``, numbers and other values as JSON, and `Load` gives them
    back as they were written (a tensor as an array, a tuple as a list); an int ``"label"`` is ``cls``. In
    Parquet each field is a column, of the type that Arrow finds for the first samples' values.

    Not thread-safe.

    Args:
        target: the folder.
        format: one of those of docs/formats.md, such as ``"parquet"``.
        size: of a shard, in bytes or such as ``"128 MB"``; one that has a single larger sample is larger.

    Raises:
        DataError: the folder holds other shards, was begun with other settings, or is written by another process.
        GraphError: the format or the size is none.

    Attributes:
        written: samples in finished shards, those from before a stop included.
        classes: the names of the classes that labels number, for the manifest.
    """

    classes: tuple[str, ...] = ()

    def __init__(
        self,
        target: str | os.PathLike[str],
        format: str = "tar",
        size: int | str = SIZE,
        *,
        source: Any = None,
    ) -> None:
        self._nbytes = parse_bytes(size, "ShardWriter: size")
        encoder_of(format)
        self._target = PackFolder(target, {"format": format, "size": self._nbytes, "source": source})
        self._shard: OpenShard | None = None
        self._held = 0
        self._closed = False
        if self._target.complete:
            self.written = len(self._target.manifest())
            return
        if source == STREAM:
            self._target.begin_again()
        else:
            self._target.find_finished()
        self.written = sum(index.samples for index in self._target.finished)
        self._encoder = encoder_of(format)()
        if self._target.finished:
            self._encoder.follow(self._target.path(0))

    @property
    def complete(self) -> bool:
        """Whether everything was written before."""
        return self._target.complete

    @property
    def shards(self) -> int:
        """Finished shards."""
        return len(self._target.manifest().parts) if self.complete else len(self._target.finished)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write the next sample.

        Raises:
            DataError: the format has no place for a value, or the field had another kind in a sample before.
            LoaderClosedError: the writer was closed, or the folder was complete.
        """
        if self._closed or self._target.complete:
            raise LoaderClosedError("ShardWriter: everything was written before; choose another folder")
        encoder = self._encoder
        number = self.written + (encoder.samples if self._shard else 0)
        try:
            if not isinstance(sample, Mapping):
                raise DataError(f"a sample is a dict of fields, got {type(sample).__name__}")
            if odd := [name for name in sample if not isinstance(name, str)]:
                raise DataError(f"the names of fields are texts, got {odd[0]!r}; write {str(odd[0])!r}")
            encoded = encoder.encode(sample, number)
            nbytes = encoder.size(encoded)
            if self._shard is not None and self._held + nbytes > self._nbytes:
                self._finish_shard()
            if self._shard is None:
                self._shard = OpenShard(self._target.path(len(self._target.finished)), encoder)
                self._held = 0
            encoder.add(encoded)
            self._held += nbytes
        except DataError as error:
            note(error, f"ShardWriter: sample {number}")
            raise

    def _finish_shard(self) -> None:
        shard, self._shard = self._shard, None
        assert shard is not None
        index = shard.finish()
        self._target.finished.append(index)
        self.written += index.samples

    def close(self) -> Manifest:
        """Finish the last shard and write the manifest. Idempotent.

        Raises:
            DataError: no sample was written.
        """
        if self._closed or self._target.complete:
            self._closed = True
            return self._target.manifest()
        try:
            if self._shard is not None:
                self._finish_shard()
            if not self._target.finished:
                raise DataError(f"{self._target.folder!r}: no sample was written, so there is no shard")
            manifest = self._target.finish(self.classes)
            self._closed = True
            return manifest
        finally:
            if self._shard is not None:
                self._shard.abandon()
            self._target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._closed = True
        try:
            if self._shard is not None:
                self._shard.abandon()
        finally:
            self._target.close()


class OpenShard:
    """A shard that is being written; :meth:`finish` gives it its name, :meth:`abandon` leaves no trace of it."""

    def __init__(self, path: str, encoder: Encoder) -> None:
        folder, name = os.path.split(path)
        self._path, self._encoder = path, encoder
        self._temporary = os.path.join(folder, f".{name}{PARTIAL}{os.getpid()}")
        Path(self._temporary).unlink(missing_ok=True)  # of an earlier process with the same number
        self._file = open(self._temporary, "xb", _PIECE_NBYTES)  # noqa: SIM115  abandon() closes it
        encoder.begin(self._file)

    def finish(self) -> PartIndex:
        """The shard is complete, and on the disk."""
        try:
            self._encoder.finish()
            self._file.flush()
            os.fsync(self._file.fileno())
            part = Part(self._path)
            with LocalFile(self._temporary) as file:
                index = index_part(part, file)
            os.replace(self._temporary, self._path)
        finally:
            self.abandon()
        sync_folder(os.path.dirname(self._path))
        return index

    def abandon(self) -> None:
        """Remove what was written, if it was not finished."""
        with contextlib.suppress(OSError):  # a full disk, which was said before
            self._file.close()
        Path(self._temporary).unlink(missing_ok=True)
