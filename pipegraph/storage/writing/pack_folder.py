"""The output folder of a pack: finished shards and settings.

A shard gets its name once it is finished and on the disk, so what has a shard's name is whole. While a pack is not
complete, ``_pack.json.partial`` holds its settings, and the lock of the process that writes. At the end come
``_manifest.json``, as ``pipegraph index`` writes it, and ``_pack.json``: the settings that identify the pack.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final

from pipegraph.errors import DataError
from pipegraph.paths import path_of
from pipegraph.stopping import Closing
from pipegraph.storage.indexing import index_part
from pipegraph.storage.locks import is_at, try_exclusive
from pipegraph.storage.manifest import Manifest, PartIndex, write_atomically
from pipegraph.storage.parts import (
    JOURNAL,
    MANIFEST,
    SETTINGS,
    Part,
    unfinished_pack,
)
from pipegraph.storage.shard_files import LocalFile, crc32c_extend
from pipegraph.storage.writing.encoders import encoder_of

PARTIAL: Final = ".partial-"
"""In the name of a shard that is not finished."""


class PackFolder(Closing):
    """A folder under construction; one process at a time writes to it."""

    def __init__(self, folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self.folder = os.path.abspath(os.path.expanduser(path_of(folder, "the folder for the shards")))
        self.settings = json.loads(json.dumps(settings))
        self.finished: list[PartIndex] = []
        self._file: BinaryIO | None = None
        self._path = Path(unfinished_pack(self.folder) or os.path.join(self.folder, JOURNAL))
        self.complete = self._was_completed()
        if not self.complete:
            # A library that is missing is named before there is anything to continue.
            crc32c_extend()
            encoder_of(self.settings["format"])()
            os.makedirs(self.folder, exist_ok=True)
            self._begin()

    def path(self, number: int) -> str:
        """Where a shard lies when it is finished."""
        return os.path.join(self.folder, encoder_of(self.settings["format"]).shard_name.format(number))

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

    def find_finished(self) -> None:
        """Index the shards from number 0 on that an earlier run has finished."""
        with ThreadPoolExecutor(thread_name_prefix="pipegraph-index") as pool:
            self.finished = list(pool.map(index_shard, self._there()))

    def begin_again(self) -> None:
        """Remove what an earlier run has finished."""
        for path in list(self._there()):
            os.unlink(path)

    def _there(self) -> Iterator[str]:
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


def index_shard(path: str) -> PartIndex:
    """Of a finished shard."""
    part = Part(path)
    with LocalFile(path) as file:
        return index_part(part, file)
