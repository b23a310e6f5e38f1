"""Pieces of blocks: runs of whole samples that can be fetched alone, so that a first batch needs no whole blocks.

A block is large, so that requests are few and a manifest is small. Its pieces, of about 64 kB or one sample each, are
written by ``pipegraph index`` into one small file per part, in a folder beside the manifest, and read from
there block by block, when they are asked for: a rank holds those of the blocks it begins with, and no more.

The file of a part, all little-endian: 8 bytes of magic; int64 (blocks + 1,), where the record of each block starts and
the last one ends; then the records: CRC-32C of the rest (uint32), the number n of pieces (uint32), and per piece its
offset in the block (uint64, (n,)), its bytes, its samples and its CRC-32C (uint32, (n,) each). It is named by a hash
of what the manifest says of the part, so that one of another state of the part is never taken.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from pipegraph.errors import DataError
from pipegraph.storage.formats.shard_format import Block

from .checksum import crc32c_extend, file_crc32c
from .formats import Format, TokenFormat
from .formats.arrays import NpyFormat
from .manifest import Manifest, PartIndex, write_atomically
from .parts import is_url
from .shard_files import ShardFile
from .stores import StoreClient

PIECE_NBYTES: Final = 1 << 16
"""Small samples share a piece: below this latency is all that counts, and the files are below 0.04 % of the data."""

SUFFIX: Final = ".pieces"
"""Of the folder beside a manifest, after the manifest's own name."""

_MAGIC: Final = b"PGPIECE1"
_COLUMNS: Final = ("<u8", "<u4", "<u4", "<u4")
_PIECE: Final = sum(np.dtype(column).itemsize for column in _COLUMNS)
_REMEMBERED: Final = 1024


class Piece(NamedTuple):
    """A run of samples as a block of its own, and the CRC-32C of its bytes."""

    block: Block
    crc32c: int | None


@final
@dataclass(frozen=True)
class Pieces:
    """The pieces of one block, in order, together all its samples."""

    pieces: tuple[Piece, ...]

    def of(self, index: int) -> tuple[int, Piece]:
        """The number of the piece that holds the block's sample ``index``, and the piece."""
        first = self.pieces[0].block.first + index
        low, high = 0, len(self.pieces)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.pieces[middle].block.first <= first else (low, middle)
        return low, self.pieces[low]


def fixed_pieces(form: Format, block: Block) -> Pieces | None:
    """The pieces of a block of rows of one size, by arithmetic; None for other formats."""
    if isinstance(form, TokenFormat):
        step, row = form.stride * form.dtype.itemsize, form.window * form.dtype.itemsize
    elif isinstance(form, NpyFormat):
        step = row = block.nbytes // block.samples
    else:
        return None
    rows = max(1, PIECE_NBYTES // step)
    return Pieces(
        tuple(
            Piece(
                Block(
                    block.offset + first * step,
                    (min(rows, block.samples - first) - 1) * step + row,
                    block.first + first,
                    min(rows, block.samples - first),
                ),
                None,
            )
            for first in range(0, block.samples, rows)
        )
    )


def _grouped(singles: Iterator[Block], block: Block) -> Pieces:
    """The next single samples as pieces of a block; the block itself where they do not make it up."""
    pieces: list[Piece] = []
    run: Block | None = None
    left = block.samples
    while left:
        single = next(singles, None)
        if single is None or single.samples > left:
            return Pieces((Piece(block, None),))
        left -= single.samples
        if run is not None and single.offset + single.nbytes - run.offset <= PIECE_NBYTES:
            nbytes = single.offset + single.nbytes - run.offset
            run = Block(run.offset, nbytes, run.first, run.samples + single.samples)
        else:
            if run is not None:
                pieces.append(Piece(run, None))
            run = single
    if run is not None:
        pieces.append(Piece(run, None))
    first = pieces[0].block.first if pieces else block.first
    return Pieces(tuple(pieces)) if pieces and first == block.first else Pieces((Piece(block, None),))


def pieces_name(part: PartIndex) -> str:
    """The file of a part's pieces; the folder that the part lies in does not count."""
    facts = [part.part.name, part.part.size, part.crc32c, *((b.offset, b.samples) for b in part.blocks)]
    return hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@final
class PieceWriter:
    """The pieces of one part, found block by block while it is indexed, so that bytes that are at hand serve both.

    Args:
        file: the part; read once more, and every byte for the pieces' checksums.
    """

    def __init__(self, form: Format, file: ShardFile) -> None:
        self._form, self._file = form, file
        self._singles: Iterator[Block] | None = None
        self._records: list[bytes] = []

    def add(self, block: Block) -> None:
        """The next block was found.

        Raises:
            ShardError: the part is broken.
        """
        pieces = fixed_pieces(self._form, block)
        if pieces is None:
            if self._singles is None:
                self._singles = self._form.index(self._file, 1)
            pieces = _grouped(self._singles, block)
        self._records.append(_record(self._file, pieces, block))

    def save(self, folder: str, part: PartIndex, store: StoreClient | None = None) -> None:
        """Write them into the folder, at once or not at all."""
        starts = np.cumsum(
            [len(_MAGIC) + 8 * (len(self._records) + 1), *map(len, self._records)], dtype="<i8"
        )
        data = b"".join([_MAGIC, starts.tobytes(), *self._records])
        if is_url(folder):
            if store is None:
                raise DataError(f"{folder}: writing to a store needs store=StoreClient(...)")
            store.put(f"{folder}/{pieces_name(part)}", data)
        else:
            os.makedirs(folder, exist_ok=True)
            write_atomically(os.path.join(folder, pieces_name(part)), [data])


def _record(file: ShardFile, pieces: Pieces, block: Block) -> bytes:
    found = [p.block for p in pieces.pieces]
    if len(found) == 1 or max(b.nbytes for b in found) >= 2**32:
        found = []  # the block is read as a whole
    columns = (
        [b.offset - block.offset for b in found],
        [b.nbytes for b in found],
        [b.samples for b in found],
        [file_crc32c(file, b.offset, b.nbytes) for b in found],
    )
    body = len(found).to_bytes(4, "little")
    body += b"".join(np.array(c, dtype=t).tobytes() for c, t in zip(columns, _COLUMNS, strict=True))
    return crc32c_extend()(0, body).to_bytes(4, "little") + body


def _parsed(data: bytes, block: Block) -> Pieces | None:
    """The pieces in a record; None where there are none, or it is broken."""
    if len(data) < 8 or int.from_bytes(data[:4], "little") != crc32c_extend()(0, data[4:]):
        return None
    count = int.from_bytes(data[4:8], "little")
    if not count or len(data) != 8 + count * _PIECE:
        return None
    columns, at = [], 8
    for kind in _COLUMNS:
        column = np.frombuffer(data, kind, count, at)
        columns.append(column.astype(np.int64))
        at += column.nbytes
    offsets, nbytes, samples, crcs = columns
    ends = np.cumsum(samples)
    if ends[-1] != block.samples or (offsets + nbytes > block.nbytes).any():
        return None
    firsts = ends - samples + block.first
    rows = zip(
        (offsets + block.offset).tolist(),
        nbytes.tolist(),
        firsts.tolist(),
        samples.tolist(),
        crcs.tolist(),
        strict=True,
    )
    return Pieces(tuple(Piece(Block(o, n, f, s), crc) for o, n, f, s, crc in rows))


@final
class PieceFolder:
    """The pieces of a data set, block by block. Any thread may call anything.

    Args:
        folder: beside the manifest; path or URL. It need not be there.
        store: reads a remote one.
    """

    def __init__(self, folder: str, manifest: Manifest, store: StoreClient | None) -> None:
        self._folder, self._manifest, self._store = folder, manifest, store
        self._lock = threading.Lock()
        self._starts: OrderedDict[int, tuple[str, list[int]] | None] = OrderedDict()

    def of(self, number: int) -> Pieces | None:
        """The pieces of a block; None where they are not known.

        Raises:
            LoaderClosedError: the store was closed.
        """
        part_number, block = self._manifest.block(number)
        found = self._part(part_number)
        if found is None:
            return None
        name, starts = found
        at = number - int(self._manifest.first_block[part_number])
        try:
            return _parsed(self._read(name, starts[at], starts[at + 1] - starts[at]), block)
        except (DataError, OSError):
            return None

    def _part(self, number: int) -> tuple[str, list[int]] | None:
        with self._lock:
            if number in self._starts:
                return self._starts[number]
        part = self._manifest.part_index(number)
        name, found = pieces_name(part), None
        nbytes = len(_MAGIC) + 8 * (len(part.blocks) + 1)
        try:
            head = self._read(name, 0, nbytes)
            starts = np.frombuffer(head, "<i8", offset=len(_MAGIC)).tolist()
            if head.startswith(_MAGIC) and starts[0] == nbytes and starts == sorted(starts):
                found = (name, starts)
        except (DataError, OSError, ValueError):
            pass  # none was written, or it is not one: the blocks are read whole
        with self._lock:
            self._starts[number] = found
            while len(self._starts) > _REMEMBERED:
                self._starts.popitem(last=False)
        return found

    def _read(self, name: str, offset: int, nbytes: int) -> bytes:
        if is_url(self._folder):
            if self._store is None:
                raise DataError(f"{self._folder}: needs a store")
            remote: bytes = self._store.read(f"{self._folder}/{name}", offset, nbytes)
            return remote
        with open(os.path.join(self._folder, name), "rb", buffering=0) as file:
            data = os.pread(file.fileno(), nbytes, offset)
        if len(data) != nbytes:
            raise DataError(f"{name}: cut short")
        return data
