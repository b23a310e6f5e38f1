"""Tar archives in the WebDataset convention.

The files of one sample lie together and share the path up to the first dot of
the last component; the rest, in lower case, is the field: ``a/01.jpg`` and
``a/01.cls`` make the sample ``{"key": "a/01", "jpg": bytes, "label": int}``.
As in WebDataset, files whose name has no dot or starts with one are passed over,
and so are those under a name like ``__meta__``; and files whose name ends with a
dot, which are the field "" there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from pipegraph.errors import ShardError
from pipegraph.storage.shard_files import ShardFile

from .shard_format import BLOCK_NBYTES, MAX_FIELD_NBYTES, Block, BlockSamples, Format, Sample, blocks_between
from .tarheader import DECODERS, Member, members

# A sample with more fields than this is taken for an attack: a million tiny
# members that share a key would be one dict.
MAX_FIELDS: Final = 1000

# Read at a time by an index: tiny members share one read, large ones are skipped.
_SCAN_NBYTES: Final = 1 << 13

# Fields from this size on are read alone.
_LARGE_NBYTES: Final = 1 << 15
_WHOLE: Final = re.compile(rb"\s*[+-]?[0-9]+\s*")  # int() takes 1_000 too


@final
class TarFormat(Format):
    """Plain tar (ustar, pax, GNU). Values are bytes, or what `ShardWriter` noted; a ``cls`` that holds a whole
    number of 64 bits becomes the int ``label``.

    A file ``x.key`` is the field ``_key``, since ``key`` says which sample it is.

    A leading ``./`` belongs to the key, as in WebDataset.
    Links, devices, pipes, sparse files, absolute paths and ``..`` are refused.
    """

    suffixes = (".tar",)
    in_place = True

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        window = _Window(file, file.size, file.stream_nbytes)
        return _samples(members(window.read, 0, file.size, file.name, marker=True), window, file.name)

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        return blocks_between(_sample_starts(file, 0, file.size, marker=True), block_nbytes)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        return _TarBlock(file, block)


class _TarBlock(BlockSamples[Sample]):
    """The samples of one block; each is one ``read_at`` of its own bytes."""

    def __init__(self, file: ShardFile, block: Block) -> None:
        self._file, self._block = file, block
        stop = block.offset + block.nbytes
        # Blocks end where their last sample does. One that ends with the file is what lies behind the last whole
        # block of a broken part, or has the archive's end in it: without its marker it was cut short.
        self._starts = array("q", _sample_starts(file, block.offset, stop, marker=stop == file.size))
        self.nbytes = 8 * len(self._starts)
        block.check(f"{file.name}: the block at byte {block.offset}", len(self))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def sample(self, index: int) -> Sample:
        start, stop = self._starts[index], self._starts[index + 1]
        size = stop - start
        window = _Window(self._file, stop, size if size < 2 * _LARGE_NBYTES else _SCAN_NBYTES)
        name = self._file.name
        return next(_samples(members(window.read, start, stop, name, marker=False), window, name))


class _Window:
    """Bytes of a file through a buffer that moves forward; large fields go past it, not to be copied twice."""

    def __init__(self, file: ShardFile, stop: int, nbytes: int) -> None:
        self._file, self._stop, self._limit = file, stop, nbytes
        self._ahead = nbytes
        self._base, self._buffer = 0, b""

    def read(self, offset: int, nbytes: int) -> bytes:
        at = offset - self._base
        buffer = self._buffer
        if at >= 0 and at + nbytes <= len(buffer):
            return buffer[at : at + nbytes]
        if nbytes >= _LARGE_NBYTES:
            self._ahead = min(_SCAN_NBYTES, self._limit)
            return self._file.read_at(offset, nbytes)
        self._base = offset
        self._buffer = self._file.read_at(offset, max(nbytes, min(self._ahead, self._stop - offset)))
        self._ahead = min(2 * self._ahead, self._limit)
        return self._buffer[:nbytes]


def split_key(name: str) -> tuple[str, str] | None:
    """(key, field) of a member's path, or None if it belongs to no sample."""
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot <= slash or name.endswith("."):
        return None
    if "__" in name and any(len(c) > 4 and c[:2] == c[-2:] == "__" for c in name.split("/")):
        return None
    return name[:dot], name[dot + 1 :].lower()


def _samples(found: Iterator[Member], window: _Window, file_name: str) -> Iterator[Sample]:
    key: str | None = None
    sample: Sample = {}
    stem = "/"  # of the last member: no name starts so
    for name, header, data, size, note in found:
        # The short way, for a second file of the same sample.
        field = name[len(stem) :].lower()
        if not (name.startswith(stem) and field) or "/" in field:
            split = split_key(name)
            if split is None:
                continue
            if split[0] != key:
                if key is not None:
                    yield sample
                key = split[0]
                sample = {"key": key}
            field = split[1]
            stem = name[: len(name) - len(field)]
        if size > MAX_FIELD_NBYTES:
            raise ShardError(f"{file_name}: field {name!r} says {size} bytes, more than {MAX_FIELD_NBYTES}")
        content = window.read(data, size)
        value: Any = content
        decode = DECODERS.get(note)
        if decode is not None:
            try:
                value = decode(content)
            except (ValueError, RecursionError, ShardError) as error:
                raise ShardError(f"{file_name}: field {name!r} (byte {header}) is broken: {error}") from error
        elif field == "cls":
            label = whole_number(content)
            if label is not None:
                field, value = "label", label
        if field == "key":
            field = "_key"
        if field in sample:
            both = ": a whole number in .cls is the label" if field == "label" else ""
            raise ShardError(
                f"{file_name}: sample {key!r} has the field {field!r} twice (byte {header}){both}"
            )
        sample[field] = value
        if len(sample) > MAX_FIELDS:
            raise ShardError(f"{file_name}: sample {key!r} has more than {MAX_FIELDS} fields")
    if key is not None:
        yield sample


def whole_number(value: bytes) -> int | None:
    """The whole number of 64 bits that a ``cls`` holds; None for a name or another text, which stays what it is."""
    if len(value) > 20 or not _WHOLE.fullmatch(value):
        return None
    number = int(value)
    return number if -(1 << 63) <= number < 1 << 64 else None


def _sample_starts(file: ShardFile, start: int, stop: int, *, marker: bool = False) -> Iterator[int]:
    """Where each sample starts, and at last where the last one ends."""
    key: str | None = None
    end = start
    window = _Window(file, stop, _SCAN_NBYTES)
    for name, header, data, size, _ in members(window.read, start, stop, file.name, marker=marker):
        split = split_key(name)
        if split is not None and split[0] != key:
            key = split[0]
            yield header
        end = data + size + (-size & 511)
    yield min(end, stop)
