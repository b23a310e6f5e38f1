"""JSON lines: one object per line, plain, gz or zst."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

from pipegraph.errors import ShardError
from pipegraph.storage.shard_files import ShardFile

from .shard_format import BLOCK_NBYTES, Block, Format, PlacedRows, Sample, blocks_between
from .unpacking import CHUNK_NBYTES, PackedFormat, unpacked

# A line is held in memory whole; without this a bomb of one endless line grows
# until the machine ends.
MAX_LINE_NBYTES: Final = 1 << 26


@final
class JsonLinesFormat(Format):
    """``.jsonl`` and ``.ndjson``: the objects as they are; empty lines are passed over.

    Blocks are runs of whole lines.
    """

    suffixes = (".jsonl", ".ndjson")
    in_place = True

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        return _objects(_pieces(file, 0, file.size), file.name)

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        return blocks_between(_line_starts(file), block_nbytes)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        return _rows(file, block)


@final
class PackedJsonLinesFormat(PackedFormat):
    """JSON lines in one gz or zst stream, of which no more is in memory at a time than is asked for."""

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        return _objects(unpacked(file), file.name)

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        count = sum(1 for _ in _lines(unpacked(file), file.name))
        if count:
            yield Block(0, file.size, 0, count)


def _line_starts(file: ShardFile) -> Iterator[int]:
    stop = None
    for offset, line in _lines(_pieces(file, 0, file.size), file.name):
        yield offset
        stop = min(offset + len(line) + 1, file.size)
    if stop is not None:
        yield stop


def _rows(file: ShardFile, block: Block) -> PlacedRows:
    """The lines of one block, parsed when asked for."""
    stop = block.offset + block.nbytes
    places = array("Q", (offset for offset, _ in _lines(_pieces(file, block.offset, stop), file.name)))
    block.check(f"{file.name}: the block at byte {block.offset}", len(places), "lines")
    places.append(block.nbytes)
    return PlacedRows(file, block.offset, places, _parse, anywhere=True)


_decode: Final = json.JSONDecoder().raw_decode


def _value(line: bytes) -> Any:
    """As ``json.loads``, in half its time where nothing is unusual."""
    try:
        text = line.decode()
        value, end = _decode(text)
    except ValueError:
        return json.loads(line)
    return value if end == len(text) else json.loads(line)


def _parse(line: bytes, name: str, offset: int) -> Sample:
    try:
        value = _value(line.strip())
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{name}, byte {offset}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ShardError(f"{name}, byte {offset}: a line must hold an object, got {type(value).__name__}")
    return value


def _objects(pieces: Iterable[bytes], name: str) -> Iterator[Sample]:
    for offset, line in _lines(pieces, name):
        yield _parse(line, name, offset)


def _lines(pieces: Iterable[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """The non-empty lines without their ends, and where each begins."""
    offset, rest = 0, list[bytes]()
    for piece in pieces:
        rest.append(piece)
        if b"\n" in piece:
            lines = b"".join(rest).split(b"\n")
            rest = [lines.pop()]
            for line in lines:
                if line.strip():
                    yield offset, line
                offset += len(line) + 1
        if sum(map(len, rest)) > MAX_LINE_NBYTES:
            raise ShardError(f"{name}: the line at byte {offset} is longer than {MAX_LINE_NBYTES} bytes")
    line = b"".join(rest)
    if line.strip():
        yield offset, line


def _pieces(file: ShardFile, start: int, stop: int) -> Iterator[bytes]:
    for at in range(start, stop, CHUNK_NBYTES):
        yield file.read_at(at, min(CHUNK_NBYTES, stop - at))
