"""Manifests: the parts of a dataset and where their samples lie."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from pipegraph.errors import DataError
from pipegraph.order.layout import MAX_SAMPLES
from pipegraph.paths import path_of
from pipegraph.storage.formats.shard_format import Block

from .parts import Part, is_url

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .stores import StoreClient

VERSION: Final = 1
_UNKNOWN: Final = -1

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PartIndex:
    """What is known of one part: its blocks are all its samples in order; checksums are None, or empty, if unknown."""

    part: Part
    blocks: tuple[Block, ...]
    crc32c: int | None = None
    block_crc32c: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        return sum(block.samples for block in self.blocks)


@dataclass(frozen=True, eq=False)
class Manifest:
    """The parts of a dataset with their samples and blocks; equal if names, sizes, checksums and layout are.

    Blocks and samples are numbered through all parts, in the order of `parts`.
    Arrays are int64 and not to be changed.

    Args:
        parts: uri and size of each part.
        part_crc32c: (parts,), -1 where unknown.
        first_block: (parts + 1,), the number of each part's first block.
        block_offsets: (blocks,), byte in the part.
        block_nbytes: (blocks,).
        block_samples: (blocks,).
        block_crc32c: (blocks,), -1 where unknown.
        classes: the names of the classes, in the order of their labels, where a pack of class folders knows them.
    """

    parts: tuple[Part, ...]
    part_crc32c: Int64Array
    first_block: Int64Array
    block_offsets: Int64Array
    block_nbytes: Int64Array
    block_samples: Int64Array
    block_crc32c: Int64Array
    classes: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.block_samples.sum(dtype=np.float64) > MAX_SAMPLES:
            part, block = self.block(int(self.block_samples.argmax()))
            raise DataError(
                f"{self.parts[part].name}: a block of {block.samples} samples, but no dataset has more than "
                f"{MAX_SAMPLES}; the shard, or its manifest, is damaged or forged"
            )

    @cached_property
    def first_sample(self) -> Int64Array:
        """The number of each block's first sample, and of the one behind the last, (blocks + 1,)."""
        return np.concatenate([[0], np.cumsum(self.block_samples, dtype=np.int64)])

    @staticmethod
    def of(indexes: Sequence[PartIndex], classes: tuple[str, ...] = ()) -> Manifest:
        """The manifest of indexed parts, in their order."""

        def int64(values: Iterator[int]) -> Int64Array:
            return np.fromiter(values, np.int64)

        blocks = [len(i.blocks) for i in indexes]
        return Manifest(
            parts=tuple(i.part for i in indexes),
            part_crc32c=int64(_UNKNOWN if i.crc32c is None else i.crc32c for i in indexes),
            first_block=np.concatenate([[0], np.cumsum(blocks, dtype=np.int64)]).astype(np.int64),
            block_offsets=int64(b.offset for i in indexes for b in i.blocks),
            block_nbytes=int64(b.nbytes for i in indexes for b in i.blocks),
            block_samples=int64(b.samples for i in indexes for b in i.blocks),
            block_crc32c=int64(c for i in indexes for c in i.block_crc32c or [_UNKNOWN] * len(i.blocks)),
            classes=classes,
        )

    def __len__(self) -> int:
        """Samples in all parts."""
        return int(self.first_sample[-1])

    @property
    def blocks(self) -> int:
        return len(self.block_samples)

    @cached_property
    def part_samples(self) -> Int64Array:
        """Samples of each part, (parts,)."""
        return np.diff(self.first_sample[self.first_block])

    @property
    def nbytes(self) -> int:
        return sum(p.size or 0 for p in self.parts)

    def block(self, number: int) -> tuple[int, Block]:
        """The number of the part that a block lies in, and the block."""
        part = int(np.searchsorted(self.first_block, number, "right")) - 1
        first = int(self.first_sample[number] - self.first_sample[self.first_block[part]])
        return part, Block(
            int(self.block_offsets[number]),
            int(self.block_nbytes[number]),
            first,
            int(self.block_samples[number]),
        )

    def block_checksum(self, number: int) -> int | None:
        """CRC-32C of a block's bytes, if known."""
        crc = int(self.block_crc32c[number])
        return None if crc == _UNKNOWN else crc

    def chosen(self, numbers: Sequence[int], parts: Sequence[Part]) -> Manifest:
        """What it says of the parts with these numbers, as these parts."""
        spans = [np.arange(self.first_block[number], self.first_block[number + 1]) for number in numbers]
        blocks = np.concatenate([*spans, np.empty(0, np.int64)]).astype(np.int64)
        return Manifest(
            tuple(parts),
            self.part_crc32c[list(numbers)],
            np.cumsum([0, *map(len, spans)], dtype=np.int64),
            self.block_offsets[blocks],
            self.block_nbytes[blocks],
            self.block_samples[blocks],
            self.block_crc32c[blocks],
            classes=self.classes,
        )

    @cached_property
    def digest(self) -> str:
        """Names, sizes and layout as one hash, the same when a dataset is copied or indexed anew: what a position is
        in.
        """
        return self._hash(self.first_block, self.block_offsets, self.block_samples)

    @cached_property
    def contents(self) -> str:
        """The digest with what is known of the bytes: the parts' checksums."""
        return self._hash(self.part_crc32c, self.first_block, self.block_offsets, self.block_samples)

    def _hash(self, *columns: Int64Array) -> str:
        hash = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            hash.update(f"{part.name}\0{part.size}\n".encode("utf-8", "surrogateescape"))
        for facts in columns:
            hash.update(facts.astype("<i8").tobytes())
        return hash.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.contents == other.contents

    def __hash__(self) -> int:
        return hash(self.contents)

    def __repr__(self) -> str:
        counts = f"{len(self.parts)} parts, {self.blocks} blocks, {len(self)} samples"
        return f"<Manifest {self.digest[:8]}: {counts}>"

    def dumps(self, folder: str | None = None) -> str:
        """As JSON, one part per line; local paths relative to `folder`."""
        head = json.dumps({"version": VERSION, "digest": self.contents, "classes": self.classes})[:-1]
        records = ",\n".join(json.dumps(self._record(number, folder)) for number in range(len(self.parts)))
        return f'{head}, "parts": [\n{records}\n]}}\n'

    def _record(self, number: int, folder: str | None) -> dict[str, Any]:
        part = self.parts[number]
        blocks = slice(int(self.first_block[number]), int(self.first_block[number + 1]))
        crc, crcs = int(self.part_crc32c[number]), self.block_crc32c[blocks]
        return {
            "uri": part.uri if folder is None or not part.is_local else _relative(part.uri, folder),
            "nbytes": part.size,
            "crc32c": None if crc == _UNKNOWN else crc,
            "samples": self.block_samples[blocks].tolist(),
            "offsets": self.block_offsets[blocks].tolist(),
            "block_nbytes": self.block_nbytes[blocks].tolist(),
            "block_crc32c": [] if _UNKNOWN in crcs else crcs.tolist(),
        }

    @staticmethod
    def loads(text: str | bytes, folder: str | None = None, name: str = "manifest") -> Manifest:
        """The reverse of `dumps`.

        Raises:
            DataError: not a manifest, of another version, or changed since it was written.
        """
        try:
            head = json.loads(text)
            version, digest = head["version"], head["digest"]
            if version != VERSION:
                raise DataError(
                    f"{name}: manifest version {version!r}, this release reads {VERSION}; index again"
                )
            manifest = _of_records(head["parts"], folder, tuple(head.get("classes", ())))
        except DataError:
            raise
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise DataError(f"{name}: not a manifest: {type(error).__name__}: {error}") from error
        if manifest.contents != digest:
            raise DataError(
                f"{name}: its digest does not match its contents; it was changed by hand, index again"
            )
        return manifest

    def save(self, path: str | os.PathLike[str], store: StoreClient | None = None) -> None:
        """Write to a file or object, at once or not at all; a file names local parts relative to itself.

        Raises:
            DataError: a local part cannot be named in a remote manifest.
        """
        name = path_of(path, "Manifest.save: path")
        if not is_url(name):
            folder = os.path.dirname(os.path.abspath(name))
            write_atomically(name, self.dumps(folder).encode())
            return
        local = next((part for part in self.parts if part.is_local), None)
        if local is not None:
            raise DataError(f"{name}: a remote manifest cannot name the local part {local.uri!r}")
        with _client(store) as client:
            client.put(name, self.dumps().encode())

    @staticmethod
    def load(path: str | os.PathLike[str], store: StoreClient | None = None) -> Manifest:
        """Read what `save` wrote.

        Args:
            store: for a URL; else one is made from the environment.

        Raises:
            DataError: as `loads`, or the store has no such object.
            OSError: the file cannot be read.
        """
        name = path_of(path, "Manifest.load: path")
        if is_url(name):
            with _client(store) as client:
                return Manifest.loads(client.read(name, 0, client.head(name).size or 0), None, name)
        with open(name, "rb") as file:
            return Manifest.loads(file.read(), os.path.dirname(name), name)


def _of_records(records: list[dict[str, Any]], folder: str | None, classes: tuple[str, ...]) -> Manifest:
    parts, crcs, columns = list[Part](), list[int](), list[list[Int64Array]]()
    for record in records:
        size, crc, uri = record["nbytes"], record["crc32c"], record["uri"]
        if not isinstance(uri, str) or type(size) is not int or size < 0:
            raise TypeError("uri is a string and nbytes a whole number")
        if folder is not None and not is_url(uri):
            # "a/../b" is not "b" where a is a link: only what `_relative` put in front is taken away.
            above = uri.startswith("../")
            uri = os.path.join(os.path.realpath(folder) if above else folder, uri)
        offsets, nbytes, samples = (_whole(record[n]) for n in ("offsets", "block_nbytes", "samples"))
        block_crcs = _whole(record["block_crc32c"] or [_UNKNOWN] * len(offsets))
        if not len(offsets) == len(nbytes) == len(samples) == len(block_crcs):
            raise ValueError(f"{uri}: lists of unequal length")
        inside = (offsets >= 0) & (nbytes >= 0) & (nbytes <= size) & (offsets <= size - nbytes)
        if not (inside & (samples >= 1)).all():
            raise ValueError(f"{uri}: a block lies outside the part's {size} bytes or has no samples")
        parts.append(Part(uri, size))
        crcs.append(_UNKNOWN if crc is None else int(crc))
        columns.append([offsets, nbytes, samples, block_crcs])
    first_block = np.cumsum([0, *(len(each[0]) for each in columns)], dtype=np.int64)
    empty = np.empty(0, np.int64)
    laid = [np.concatenate([empty, *(each[number] for each in columns)]) for number in range(4)]
    return Manifest(tuple(parts), np.array(crcs, np.int64), first_block, *laid, classes=classes)


def _relative(path: str, folder: str) -> str:
    """A path as seen from a folder, through whatever links lead to both."""
    here, name = os.path.split(os.path.abspath(path) if ".." not in path.split(os.sep) else path)
    near = os.path.relpath(here, folder)
    if near.startswith(os.pardir) or os.pardir in path.split(os.sep):
        near = os.path.relpath(os.path.realpath(here), os.path.realpath(folder))
    return os.path.normpath(os.path.join(near, name)).replace(os.sep, "/")


def _client(store: StoreClient | None) -> AbstractContextManager[StoreClient]:
    if store is not None:
        return contextlib.nullcontext(store)
    from .stores import StoreClient

    return StoreClient()


def _whole(values: Any) -> Int64Array:
    """int64 of a JSON list of whole numbers."""
    found = np.asarray(values if len(values) else np.empty(0, np.int64))
    if found.ndim != 1 or found.dtype != np.int64:
        raise TypeError("block offsets, sizes, samples and checksums are lists of whole numbers")
    return found


def write_atomically(path: str, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new, also after a power cut."""
    folder = os.path.dirname(path) or "."
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(6)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(folder)


def sync_folder(folder: str) -> None:
    """Make renames in a folder durable."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
