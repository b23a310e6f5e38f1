"""Parquet through pyarrow; row groups are the blocks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from pipegraph.errors import DataError, PipegraphError, ShardError, extra_module
from pipegraph.storage.shard_files import ShardFile

from .arrow_rows import ArrowRows, arrow_errors
from .shard_format import BLOCK_NBYTES, MAX_UNPACKED_NBYTES, Block, Format, Sample, check_columns

_BATCH_NBYTES: Final = 1 << 22
"""About what a batch of rows may decode to; what is held is counted batch by batch."""

_BUFFER_NBYTES: Final = 1 << 17
_MAX_ROWS: Final = 1 << 14

_FIRST_ROWS: Final = 16
"""Rows read first to measure their decoded size; the footer has the encoded size only."""

_LARGE_ROW_NBYTES: Final = 1 << 13
"""Rows that are so large encoded are not looked at first: that would read their pages twice."""


@final
class ParquetFormat(Format):
    """Each row is a sample: one field per column, of a type that follows from the column's.

    Numbers, text and bytes become Python's, lists of numbers NumPy arrays of their type (a null in a list of floats is
    NaN, one in a list of integers an error), nanoseconds ``numpy.datetime64`` and ``timedelta64``,
    other nested values lists and dicts. A null of floats is NaN, any other None. Neighbouring
    small row groups share a block. Extension types are read as what they are stored as.

    Args:
        columns: to read; all by default.
    """

    suffixes = (".parquet",)
    needs_file = False
    columnar = True

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self.columns = None if columns is None else tuple(columns)

    def choosing(self, columns: Sequence[str]) -> ParquetFormat:
        return ParquetFormat(columns)

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        with self._open(file) as reader:
            for batch in self._batches(reader, file, range(reader.metadata.num_row_groups)):
                yield from self._rows([batch], file.name)[:]

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        block: Block | None = None
        for start, stop, rows in _row_groups(file):
            if block and rows and start >= block.offset and stop - block.offset <= block_nbytes:
                nbytes = max(stop, block.offset + block.nbytes) - block.offset
                block = Block(block.offset, nbytes, block.first, block.samples + rows)
            elif rows:
                if block:
                    yield block
                block = Block(start, stop - start, block.first + block.samples if block else 0, rows)
        if block:
            yield block

    def read(self, file: ShardFile, block: Block) -> ArrowRows:
        groups, first, nbytes = [], 0, 0
        batches: list[Any] = []
        with self._open(file) as reader:
            for group in range(reader.metadata.num_row_groups):
                if first >= block.first and first < block.first + block.samples:
                    groups.append(group)
                first += reader.metadata.row_group(group).num_rows
            for batch in self._batches(reader, file, groups):
                batches.append(batch)
                nbytes += batch.get_total_buffer_size()
                self.take_room(nbytes, file.name)
        block.check(f"{file.name}: the block at row {block.first}", sum(map(len, batches)), "rows")
        rows = self._rows(batches, file.name)
        rows.nbytes = nbytes
        return rows

    def _rows(self, batches: list[Any], name: str) -> ArrowRows:
        # Laid together, so that a sample is found, and rows are taken, in one.
        table = importlib.import_module("pyarrow").Table.from_batches(batches).combine_chunks()
        return ArrowRows(table, name, copied=True)

    def _open(self, file: ShardFile) -> Any:
        parquet = extra_module("pyarrow.parquet", "shards", f"reading {file.name}", "pyarrow")
        try:
            # Pages that carry a CRC are checked. Column chunks are read in pieces: the first rows cost no more.
            reader = parquet.ParquetFile(
                file.open_raw(),
                page_checksum_verification=True,
                pre_buffer=False,
                buffer_size=_BUFFER_NBYTES,
            )
            names = reader.schema_arrow.names
        except arrow_errors() as error:
            raise ShardError(f"{file.name}: not a Parquet file: {error}") from error
        try:
            check_columns(self.columns, names, file.name)
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ShardError(
                    f"{file.name}: has two columns {twice!r}; a sample's fields need names of their own"
                )
        except DataError:
            reader.close()
            raise
        return reader

    def _batches(self, reader: Any, file: ShardFile, groups: Sequence[int]) -> Iterator[Any]:
        """The rows of some row groups, in batches of about `_BATCH_NBYTES` when they are decoded."""
        columns = None if self.columns is None else list(self.columns)
        sizes = [_group_size(reader, group, file.name) for group in groups]
        rows, encoded = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        if not rows:
            return
        try:
            row_nbytes = max(encoded // rows, 1)
            if row_nbytes < _LARGE_ROW_NBYTES:
                first: Any = next(reader.iter_batches(_FIRST_ROWS, row_groups=groups, columns=columns), None)
                if first is None or not first.num_rows:
                    raise ShardError(f"{file.name}: row groups that say they hold {rows} rows hold none")
                row_nbytes = max(row_nbytes, first.nbytes // first.num_rows)
            limit = min(_MAX_ROWS, max(1, _BATCH_NBYTES // row_nbytes))
            yield from reader.iter_batches(limit, row_groups=groups, columns=columns)
        except PipegraphError:  # of which some are among those below
            raise
        except arrow_errors() as error:
            shown = f"{groups[0]}..{groups[-1]}"
            raise ShardError(f"{file.name}: row groups {shown} are broken: {error}") from error


def _row_groups(file: ShardFile) -> Iterator[tuple[int, int, int]]:
    """Where each row group begins and ends, and its rows."""
    parquet = extra_module("pyarrow.parquet", "shards", f"reading {file.name}", "pyarrow")
    try:
        metadata = parquet.read_metadata(file.open_raw())
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(each) for each in range(group.num_columns)]
            starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
            sizes = [chunk.total_compressed_size for chunk in chunks]
            stops = [start + nbytes for start, nbytes in zip(starts, sizes, strict=True)]
            yield min(starts, default=0), max(stops, default=0), group.num_rows
    except PipegraphError:  # the bytes could not be had
        raise
    except arrow_errors() as error:
        raise ShardError(f"{file.name}: not a Parquet file: {error}") from error


def _group_size(reader: Any, group: int, name: str) -> tuple[int, int]:
    """Rows of a row group, and the bytes that it unpacks to, still encoded."""
    metadata = reader.metadata.row_group(group)
    rows, nbytes = metadata.num_rows, metadata.total_byte_size
    if nbytes > MAX_UNPACKED_NBYTES:
        raise ShardError(
            f"{name}: row group {group} says it unpacks to {nbytes} bytes, more than {MAX_UNPACKED_NBYTES}; "
            "write smaller row groups"
        )
    return rows, nbytes
