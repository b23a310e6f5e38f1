"""``pg.ShardWriter``: shards written from the user's own loop, into a folder of finished shards and settings.

A shard gets its name once it is finished and on the disk, so what has a shard's name is whole. While a pack is not
complete, ``_pack.json.partial`` holds its settings, and the lock of the process that writes. At the end come
``_manifest.json``, as ``pipegraph index`` writes it, and ``_pack.json``: the settings that identify the pack.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, final

from pipegraph.errors import DataError, LoaderClosedError, note
from pipegraph.paths import path_of
from pipegraph.stopping import Closing
from pipegraph.storage.indexing import index_part
from pipegraph.storage.locks import is_at, try_exclusive
from pipegraph.storage.manifest import Manifest, PartIndex, sync_folder, write_atomically
from pipegraph.storage.parts import JOURNAL, MANIFEST, SETTINGS, Part, unfinished_pack
from pipegraph.storage.shard_files import LocalFile, crc32c_extend
from pipegraph.units import parse_bytes

from .encoders import encoder_of

SIZE = "128 MB"
"""Of a shard: large enough that requests to a store do not count."""


_PIECE_NBYTES = 1 << 20


STREAM = "stream"
"""The ``source`` of what cannot be continued: it is written again from its start."""

PARTIAL: Final = ".partial-"
"""In the name of a shard that is not finished."""


class PackFolder(Closing):
    """A folder under construction; one process at a time writes to it."""

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        encoder = encoder_of(settings["format"])
        self._shard_name = encoder.shard_name
        self.folder = os.path.abspath(os.path.expanduser(path_of(folder, "the folder for the shards")))
        self.settings = json.loads(json.dumps(settings))
        self.finished: list[PartIndex] = []
        self._file: BinaryIO | None = None
        self._path = Path(unfinished_pack(self.folder) or os.path.join(self.folder, JOURNAL))
        self.complete = self._was_completed()
        if not self.complete:
            # A library that is missing is named before there is anything to continue.
            crc32c_extend()
            self.encoder = encoder()
            os.makedirs(self.folder, exist_ok=True)
            self._begin()

    def path(self, number: int) -> str:
        """Where a shard lies when it is finished."""
        return os.path.join(self.folder, self._shard_name.format(number))

    def _was_completed(self) -> bool:
        path = os.path.join(self.folder, SETTINGS)
        try:
            with open(path, "rb") as file:
                known = json.load(file)
        except FileNotFoundError:
            return False
        except ValueError as error:
            raise DataError(f"{path}: not the settings of a pack: {error}") from error
        self._compare(known, "holds a pack that was made with")
        self.manifest()
        # A process that was killed behind its last step has left these.
        Path(self.folder, JOURNAL).unlink(missing_ok=True)
        self._remove_partial()
        return True

    def manifest(self) -> Manifest:
        """The manifest of a complete pack."""
        path = os.path.join(self.folder, MANIFEST)
        manifest = Manifest.load(path)
        for part in manifest.parts:
            if not os.path.isfile(part.uri) or os.path.getsize(part.uri) != part.size:
                raise DataError(
                    f"{part.uri}: missing, or not of {part.size} bytes, though its pack is complete; remove "
                    f"{os.path.basename(path)} and the settings beside it, {SETTINGS}, to write it again"
                )
        return manifest

    def _compare(self, known: Any, how: str) -> None:
        if known == self.settings:
            return
        known = known if isinstance(known, dict) else {}
        odd = [name for name in self.settings if known.get(name) != self.settings[name]]
        facts = "; ".join(f"{name} {known.get(name)!r} there, {self.settings[name]!r} here" for name in odd)
        raise DataError(
            f"{self.folder!r} {how} other settings: {facts}. Use those, choose another folder, or remove this one"
        )

    def _begin(self) -> None:
        self._file = open(self._path, "a+b")  # noqa: SIM115  close() closes it
        try:
            self._lock(self._file.fileno())
            self._file.seek(0)
            known: dict[str, Any] = {}
            with contextlib.suppress(ValueError):  # a killed process was writing it
                known = json.loads(self._file.read())
            if known:
                self._compare(known["settings"], "was begun with")
            else:
                self._check_empty()
                self._file.truncate(0)
                self._file.write(json.dumps({"settings": self.settings}).encode() + b"\n")
                self._file.flush()
            self._remove_partial()
        except BaseException:
            self.close()
            raise

    def _lock(self, fd: int) -> None:
        try:
            alone = try_exclusive(fd) and is_at(fd, os.fspath(self._path))
        except OSError as error:
            raise DataError(
                f"{self.folder!r} lies on a file system without file locks ({error.strerror}): mount it with locks "
                "(Lustre: -o flock), or pack into a folder on another one and copy that here"
            ) from error
        if not alone:
            raise DataError(f"{self.folder!r}: another process is packing into this folder")

    def _check_empty(self) -> None:
        shard = os.path.splitext(self.path(0))[1]
        names = os.listdir(self.folder)
        found = [n for n in names if n == MANIFEST or (n.startswith("shard") and n.endswith(shard))]
        if found:
            self._path.unlink()
            raise DataError(
                f"{self.folder!r} holds {found[0]!r} already, which no pack that was stopped has left; choose another "
                "folder, or remove what is there"
            )

    def _remove_partial(self) -> None:
        written_at_once = tuple(f".{name}." for name in (MANIFEST, SETTINGS))
        for name in os.listdir(self.folder):
            if name.startswith(written_at_once) or (name.startswith(".shard") and PARTIAL in name):
                Path(self.folder, name).unlink(missing_ok=True)

    def there(self) -> Iterator[str]:
        """The shards from number 0 on that are finished."""
        return itertools.takewhile(os.path.exists, map(self.path, itertools.count()))

    def finish(self, classes: tuple[str, ...]) -> Manifest:
        """All shards are finished: write the manifest."""
        manifest = Manifest.of(self.finished, classes)
        manifest.save(os.path.join(self.folder, MANIFEST))
        text = json.dumps(self.settings, indent=1, sort_keys=True).encode() + b"\n"
        write_atomically(os.path.join(self.folder, SETTINGS), text)
        self._path.unlink(missing_ok=True)  # another process may have seen that it is complete
        return manifest

    def close(self) -> None:
        """Let another process write here. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def index_shard(path: str, at: str | None = None) -> PartIndex:
    """Of a finished shard, which may still lie elsewhere."""
    with LocalFile(at or path) as file:
        return index_part(Part(path), file)


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
        self._target = PackFolder(target, {"format": format, "size": self._nbytes, "source": source})
        self._file: BinaryIO | None = None  # of the shard that is being written
        self._held = 0
        self._closed = False
        if self._target.complete:
            self.written = len(self._target.manifest())
            return
        if source == STREAM:
            for path in list(self._target.there()):
                os.unlink(path)
        with ThreadPoolExecutor(thread_name_prefix="pipegraph-index") as pool:
            self._target.finished = list(pool.map(index_shard, self._target.there()))
        self.written = sum(index.samples for index in self._target.finished)
        if self._target.finished:
            self._target.encoder.follow(self._target.path(0))

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
        encoder = self._target.encoder
        number = self.written + (encoder.samples if self._file else 0)
        try:
            if not isinstance(sample, Mapping):
                raise DataError(f"a sample is a dict of fields, got {type(sample).__name__}")
            if odd := [name for name in sample if not isinstance(name, str)]:
                raise DataError(f"the names of fields are texts, got {odd[0]!r}; write {str(odd[0])!r}")
            encoded, nbytes = encoder.encode(sample, number)
            if self._file is not None and self._held + nbytes > self._nbytes:
                self._finish_shard()
            if self._file is None:
                self._file = open(self._places()[1], "xb", _PIECE_NBYTES)  # noqa: SIM115  _abandon() closes it
                encoder.begin(self._file)
                self._held = 0
            encoder.add(encoded, nbytes)
            self._held += nbytes
        except DataError as error:
            note(error, f"ShardWriter: sample {number}")
            raise

    def _places(self) -> tuple[str, str]:
        """Where the shard that is being written lies once it is finished, and until then."""
        path = self._target.path(len(self._target.finished))
        return path, os.path.join(self._target.folder, f".{os.path.basename(path)}{PARTIAL}{os.getpid()}")

    def _finish_shard(self) -> None:
        """The shard is complete, and on the disk."""
        assert self._file is not None
        path, temporary = self._places()
        try:
            self._target.encoder.finish()
            self._file.flush()
            os.fsync(self._file.fileno())
            index = index_shard(path, temporary)
            os.replace(temporary, path)
        finally:
            self._abandon()
        sync_folder(self._target.folder)
        self._target.finished.append(index)
        self.written += index.samples

    def _abandon(self) -> None:
        """Remove what was written of a shard, if it was not finished."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk, which was said before
                file.close()
            Path(self._places()[1]).unlink(missing_ok=True)

    def close(self) -> Manifest:
        """Finish the last shard and write the manifest. Idempotent.

        Raises:
            DataError: no sample was written.
        """
        if self._closed or self._target.complete:
            self._closed = True
            return self._target.manifest()
        try:
            if self._file is not None:
                self._finish_shard()
            if not self._target.finished:
                raise DataError(f"{self._target.folder!r}: no sample was written, so there is no shard")
            manifest = self._target.finish(self.classes)
            self._closed = True
            return manifest
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Let another process write here; what is not finished is removed."""
        try:
            self._abandon()
        finally:
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
        self._give_up()
