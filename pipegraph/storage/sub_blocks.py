"""Sub-blocks: runs of whole samples that can be fetched alone, so that a first batch needs no whole blocks.

A block is large, so that requests are few and a manifest is small. Its sub-blocks, of about 64 kB or one sample, are
written by ``pipegraph index`` into one small file per part, in a folder beside the manifest, and read from
there block by block, when they are asked for: a rank holds those of the blocks it begins with, and no more.

The file of a part, all little-endian: 8 bytes of magic; int64 (blocks + 1,), where the record of each block starts and
the last one ends; then the records: CRC-32C of the rest (uint32), the number n of sub-blocks (uint32), and for each its
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

SUB_BLOCK_NBYTES: Final = 1 << 16
"""Small samples share a sub-block: below this size only latency counts; the files take at most 0.04 % of the data."""

SUFFIX: Final = ".pieces"
"""Of the folder beside a manifest, after the manifest's own name."""

_MAGIC: Final = b"PGPIECE1"
_COLUMNS: Final = ("<u8", "<u4", "<u4", "<u4")
_SUB_BLOCK: Final = sum(np.dtype(column).itemsize for column in _COLUMNS)
_REMEMBERED: Final = 1024


class SubBlock(NamedTuple):
    """A run of samples as a block of its own, and the CRC-32C of its bytes."""

    block: Block
    crc32c: int | None


@final
@dataclass(frozen=True)
class SubBlocks:
    """The sub-blocks of one block, in order, together all its samples."""

    sub_blocks: tuple[SubBlock, ...]

    def of(self, index: int) -> tuple[int, SubBlock]:
        """The number of the sub-block that holds the block's sample ``index``, and the sub-block."""
        first = self.sub_blocks[0].block.first + index
        low, high = 0, len(self.sub_blocks)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.sub_blocks[middle].block.first <= first else (low, middle)
        return low, self.sub_blocks[low]


def fixed_sub_blocks(form: Format, block: Block) -> SubBlocks | None:
    """The sub-blocks of a block of rows of one size, by arithmetic; None for other formats."""
    if isinstance(form, TokenFormat):
        step, row = form.stride * form.dtype.itemsize, form.window * form.dtype.itemsize
    elif isinstance(form, NpyFormat):
        step = row = block.nbytes // block.samples
    else:
        return None
    rows = max(1, SUB_BLOCK_NBYTES // step)
    return SubBlocks(
        tuple(
            SubBlock(
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


def _grouped(singles: Iterator[Block], block: Block) -> SubBlocks:
    """The next single samples as sub-blocks of a block; the block itself where they do not make it up."""
    sub_blocks: list[SubBlock] = []
    run: Block | None = None
    left = block.samples
    while left:
        single = next(singles, None)
        if single is None or single.samples > left:
            return SubBlocks((SubBlock(block, None),))
        left -= single.samples
        if run is not None and single.offset + single.nbytes - run.offset <= SUB_BLOCK_NBYTES:
            nbytes = single.offset + single.nbytes - run.offset
            run = Block(run.offset, nbytes, run.first, run.samples + single.samples)
        else:
            if run is not None:
                sub_blocks.append(SubBlock(run, None))
            run = single
    if run is not None:
        sub_blocks.append(SubBlock(run, None))
    first = sub_blocks[0].block.first if sub_blocks else block.first
    return (
        SubBlocks(tuple(sub_blocks))
        if sub_blocks and first == block.first
        else SubBlocks((SubBlock(block, None),))
    )


def sub_blocks_name(part: PartIndex) -> str:
    """The file of a part's sub-blocks; the folder that the part lies in does not count."""
    facts = [part.part.name, part.part.size, part.crc32c, *((b.offset, b.samples) for b in part.blocks)]
    return hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@final
class SubBlockWriter:
    """The sub-blocks of one part, found block by block while it is indexed, so that bytes that are at hand serve both.

    Args:
        file: the part; read once more, and every byte for the sub-blocks' checksums.
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
        sub_blocks = fixed_sub_blocks(self._form, block)
        if sub_blocks is None:
            if self._singles is None:
                self._singles = self._form.index(self._file, 1)
            sub_blocks = _grouped(self._singles, block)
        self._records.append(_record(self._file, sub_blocks, block))

    def save(self, folder: str, part: PartIndex, store: StoreClient | None = None) -> None:
        """Write them into the folder, at once or not at all."""
        starts = np.cumsum(
            [len(_MAGIC) + 8 * (len(self._records) + 1), *map(len, self._records)], dtype="<i8"
        )
        data = b"".join([_MAGIC, starts.tobytes(), *self._records])
        if is_url(folder):
            if store is None:
                raise DataError(f"{folder}: writing to a store needs store=StoreClient(...)")
            store.put(f"{folder}/{sub_blocks_name(part)}", data)
        else:
            os.makedirs(folder, exist_ok=True)
            write_atomically(os.path.join(folder, sub_blocks_name(part)), [data])


def _record(file: ShardFile, sub_blocks: SubBlocks, block: Block) -> bytes:
    found = [p.block for p in sub_blocks.sub_blocks]
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


def _parsed(data: bytes, block: Block) -> SubBlocks | None:
    """The sub-blocks in a record; None where there are none, or it is broken."""
    if len(data) < 8 or int.from_bytes(data[:4], "little") != crc32c_extend()(0, data[4:]):
        return None
    count = int.from_bytes(data[4:8], "little")
    if not count or len(data) != 8 + count * _SUB_BLOCK:
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
    return SubBlocks(tuple(SubBlock(Block(o, n, f, s), crc) for o, n, f, s, crc in rows))


@final
class SubBlockFolder:
    """The sub-blocks of a data set, block by block. Thread-safe.

    Args:
        folder: beside the manifest; path or URL. It need not be there.
        store: reads a remote one.
    """

    def __init__(self, folder: str, manifest: Manifest, store: StoreClient | None) -> None:
        self._folder, self._manifest, self._store = folder, manifest, store
        self._lock = threading.Lock()
        self._starts: OrderedDict[int, tuple[str, list[int]] | None] = OrderedDict()

    def of(self, number: int) -> SubBlocks | None:
        """The sub-blocks of a block; None where they are not known.

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
        name, found = sub_blocks_name(part), None
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
