"""``pg.ShardWriter``: shards written from the user's own loop."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, final

from pipegraph.errors import DataError, LoaderClosedError, note
from pipegraph.storage.manifest import Manifest
from pipegraph.units import parse_bytes

from .encoder import Encoder
from .field_kinds import PROBES, Kinds, held, joined, nbytes_of, refuse_odd_names, undecided
from .pack_folder import PackFolder, encoder_of
from .shard_file import OpenShard

SIZE = "128 MB"
"""Of a shard: large enough that requests to a store do not count."""


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
    Parquet each field is a column, of the kind that it has in the first sample whose value says one: None and an empty
    list do not, and hold the first samples back in memory, at most 64 of them or a shard's size.

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
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        format: str = "tar",
        size: int | str = SIZE,
        *,
        source: Any = None,
    ) -> None:
        self._nbytes = parse_bytes(size, "ShardWriter: size")
        self._kind = encoder_of(format)
        settings = {"format": format, "size": self._nbytes, "source": source, "shuffle": None}
        self._target = PackFolder(target, settings)
        self._shard: OpenShard | None = None
        self._encoder: Encoder | None = None
        self._kinds: Kinds | None = None  # of the first samples, until they say what each field holds
        self._first: deque[Mapping[str, Any]] = deque()
        self._first_nbytes = self._held = 0
        self._closed = False
        if self._target.complete:
            self.written = len(self._target.manifest())
            return
        if source is None:
            self._target.find_finished()
        else:
            self._target.begin_again()
        self.written = sum(index.samples for index in self._target.finished.values())

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
            DataError: the format has no place for a value, or the field had another kind in a sample before. One of
                those that are held back can be said here later; the error says its number.
            LoaderClosedError: the writer was closed, or the folder was complete.
        """
        if self._closed or self._target.complete:
            raise LoaderClosedError("ShardWriter: everything was written before; choose another folder")
        number = self._next() + len(self._first)
        try:
            if not isinstance(sample, Mapping):
                raise DataError(f"a sample is a dict of fields, got {type(sample).__name__}")
            refuse_odd_names(sample)
            if self._encoder is None and (self._target.kinds is not None or not self._kind.has_columns):
                self._open(self._target.kinds or {})
            if self._encoder is None:
                self._hold(sample, number)
        except DataError as error:
            note(error, f"ShardWriter: sample {number}")
            raise
        if self._encoder is not None:
            self._add(sample, number)
        elif not self._waits():
            self._add_first()

    def _hold(self, sample: Mapping[str, Any], number: int) -> None:
        """One of the first samples, until a value has said what each field holds."""
        self._kinds = joined(self._kinds, sample, number)
        if undecided(self._kinds):
            sample = held(sample)
            self._first_nbytes += sum(map(nbytes_of, sample.values()))
        self._first.append(sample)

    def _waits(self) -> bool:
        enough = len(self._first) >= PROBES or self._first_nbytes >= self._nbytes
        return not enough and undecided(self._kinds or {})

    def _next(self) -> int:
        """The number of the next sample that a shard gets."""
        return self.written + (self._encoder.samples if self._shard and self._encoder else 0)

    def _add_first(self) -> None:
        """The samples that were held back, by the kinds that they say."""
        while self._first:
            self._add(self._first.popleft(), self._next())

    def _add(self, sample: Mapping[str, Any], number: int) -> None:
        try:
            encoder = self._encoder or self._open(self._kinds or {})
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
        except OSError as error:
            self._target.note_if_full(error)
            raise

    def _open(self, kinds: Kinds) -> Encoder:
        self._encoder = self._kind(kinds, self._nbytes)
        if self._kind.has_columns:
            self._target.note_kinds(kinds)
        return self._encoder

    def _finish_shard(self) -> None:
        shard, self._shard = self._shard, None
        assert shard is not None
        index = shard.finish()
        self._target.finished[len(self._target.finished)] = index
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
            self._add_first()
            if self._shard is not None:
                self._finish_shard()
            if not self._target.finished:
                raise DataError(f"{self._target.folder!r}: no sample was written, so there is no shard")
            manifest = self._target.finish()
            self._closed = True
            return manifest
        except OSError as error:
            self._target.note_if_full(error)
            raise
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
