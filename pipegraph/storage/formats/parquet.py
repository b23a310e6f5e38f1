"""Parquet through pyarrow; row groups are the blocks."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from pipegraph.errors import DataError, GraphError, PipegraphError, ShardError, extra_module, shown
from pipegraph.storage.shard_files import ShardFile

from .arrow_rows import ArrowRows
from .arrowvalues import arrow_errors, filling, kind_of
from .folder_columns import FolderValues
from .shard_format import BLOCK_NBYTES, MAX_UNPACKED_NBYTES, Block, Format, Sample

_BATCH_NBYTES: Final = 1 << 22
"""About what a batch of rows may decode to; what is held is counted batch by batch."""

_BUFFER_NBYTES: Final = 1 << 17
_MAX_ROWS: Final = 1 << 14

_STREAM_ROWS: Final = 256
"""Rows that are turned to Python values at once where all of them are read in order."""

_FIRST_ROWS: Final = 16
"""Rows read first to measure their decoded size; the footer has the encoded size only."""

_LARGE_ROW_NBYTES: Final = 1 << 13
"""Rows that are so large encoded are not looked at first: that would read their pages twice."""

Filter = Sequence[Any]
"""Conditions ``(column, operator, value)`` that must all hold, or a list of such lists, of which one must."""


@final
class ParquetFormat(Format):
    """Each row is a sample: one field per column, of a type that follows from the column's.

    Numbers, text and bytes become Python's, lists of numbers NumPy arrays of their type (a null in a list of floats is
    NaN, one in a list of integers an error without ``fill``), nanoseconds ``numpy.datetime64`` and ``timedelta64``,
    other nested values lists and dicts. A null of floats is NaN, any other None, or what ``fill`` says. Neighbouring
    small row groups share a block. Extension types are read as what they are stored as.
    The ``key=value`` folders that a part lies in are columns too; see :class:`FolderColumns`.

    Args:
        columns: to read; all by default.
        filter: as ``pyarrow.parquet.read_table`` takes it, such as ``[("label", "<", 10)]``; rows that it does not
            let pass are left out.
        fill: column -> value in place of its nulls; of lists of numbers, a list for the missing ones, a
            number for the nulls inside.
    """

    suffixes = (".parquet",)
    holds_samples = True
    needs_file = False
    columnar = True

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        filter: Filter | None = None,
        fill: Mapping[str, Any] | None = None,
    ) -> None:
        self.columns = None if columns is None else tuple(columns)
        self.filter = None if filter is None else list(filter)
        self._asked = _columns_of(self.filter or ())
        self.fill = dict(fill or {})
        self._folders: FolderValues = {}

    def beside(self, values: FolderValues) -> ParquetFormat:
        made = copy.copy(self)
        made._folders = values
        return made

    def choosing(
        self, columns: Sequence[str] | None, filter: Filter | None, fill: Mapping[str, Any] | None = None
    ) -> ParquetFormat:
        return ParquetFormat(columns, filter, fill)

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        with self._open(file) as reader:
            groups = range(reader.metadata.num_row_groups)
            for batch in self._batches(reader, file, groups, stream=True):
                kept, _ = self._passing(batch, file.name)
                table = importlib.import_module("pyarrow").Table.from_batches([kept])
                rows = _arrow_rows(table, file.name, self.fill)
                yield from rows.rows(np.arange(len(rows)))

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

    def read(self, file: ShardFile, block: Block) -> Sequence[Any]:
        """The block's rows; those that the filter does not let pass are None."""
        groups, first, count, nbytes = [], 0, 0, 0
        batches: list[Any] = []
        kept: list[Any] = []  # the places of the rows that pass
        with self._open(file) as reader:
            for group in range(reader.metadata.num_row_groups):
                if first >= block.first and first < block.first + block.samples:
                    groups.append(group)
                first += reader.metadata.row_group(group).num_rows
            for batch in self._batches(reader, file, groups):
                passing, places = self._passing(batch, file.name)
                batches.append(passing)
                nbytes += passing.get_total_buffer_size()
                if places is not None:
                    kept.append(count + places)
                    nbytes += places.nbytes
                count += batch.num_rows
                self.take_room(nbytes, file.name)
        block.check(f"{file.name}: the block at row {block.first}", count, "rows")
        # Laid together, so that a sample is found, and rows are taken, in one.
        table = importlib.import_module("pyarrow").Table.from_batches(batches).combine_chunks()
        rows = _arrow_rows(table, file.name, self.fill, np.concatenate(kept) if kept else None, count)
        rows.nbytes = nbytes
        return rows

    def fields(self, file: ShardFile) -> Mapping[str, str]:
        with self._open(file) as reader:
            schema = reader.schema_arrow.empty_table()
            schema = _with_folders(schema, self._folders_of(reader)).schema
            return {name: kind_of(schema.field(name).type) for name in self.columns or schema.names}

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
            names = [*reader.schema_arrow.names, *self._folders_of(reader)]
        except arrow_errors() as error:
            raise ShardError(f"{file.name}: not a Parquet file: {error}") from error
        twice = next((name for name in names if names.count(name) > 1), None)
        missing = next(
            (name for name in (*(self.columns or ()), *self._asked, *self.fill) if name not in names), None
        )
        if twice is None and missing is None:
            return reader
        reader.close()
        if missing is not None:
            raise DataError(
                f"{file.name}: Load asks for the column {missing!r}; there are {', '.join(map(repr, names))}"
            )
        raise ShardError(f"{file.name}: has two columns {twice!r}; a sample's fields need names of their own")

    def _batches(
        self, reader: Any, file: ShardFile, groups: Sequence[int], *, stream: bool = False
    ) -> Iterator[Any]:
        """The rows of some row groups, in batches of about `_BATCH_NBYTES` when they are decoded."""
        columns, folders = None, self._folders_of(reader)
        if self.columns is not None:
            asked = dict.fromkeys((*self.columns, *self._asked))
            columns = [name for name in asked if name not in folders]
            folders = {name: value for name, value in folders.items() if name in asked}
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
            limit = min(_STREAM_ROWS if stream else _MAX_ROWS, max(1, _BATCH_NBYTES // row_nbytes))
            for batch in reader.iter_batches(limit, row_groups=groups, columns=columns):
                yield _with_folders(batch, folders)
        except PipegraphError:  # of which some are among those below
            raise
        except arrow_errors() as error:
            shown = f"{groups[0]}..{groups[-1]}"
            raise ShardError(f"{file.name}: row groups {shown} are broken: {error}") from error

    def _folders_of(self, reader: Any) -> FolderValues:
        """The columns of the folders; of those that the file has too, its own is read."""
        names = reader.schema_arrow.names
        return {name: value for name, value in self._folders.items() if name not in names}

    def _passing(self, batch: Any, name: str) -> tuple[Any, Any]:
        """The rows that pass, in the chosen columns, and the places they had; None where all pass."""
        if self.filter is None:
            return batch, None
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        try:
            expression = parquet.filters_to_expression(self.filter)
            places = arrow.array(np.arange(batch.num_rows, dtype=np.int32))
            table = arrow.Table.from_batches([batch]).append_column(_PLACES, places).filter(expression)
        except (arrow.ArrowException, ValueError, TypeError) as error:
            raise GraphError(f"Load(filter={self.filter!r}) does not fit {name}: {error}") from error
        kept = table.select(list(self.columns or batch.schema.names)).combine_chunks()
        found = table.column(_PLACES).to_numpy()
        batches = kept.to_batches()
        return batches[0] if batches else batch.slice(0, 0).select(kept.schema.names), found


_PLACES: Final = "pipegraph: places of rows"


def _with_folders(rows: Any, folders: FolderValues) -> Any:
    """A batch or table with the columns of its part's folders behind its own."""
    if not folders:
        return rows
    arrow = importlib.import_module("pyarrow")
    columns, schema = list(rows.columns), rows.schema
    for name, (kind, value) in folders.items():
        typed = arrow.scalar(value, arrow.type_for_alias(kind))
        columns.append(arrow.repeat(typed, rows.num_rows))
        schema = schema.append(arrow.field(name, typed.type))
    return type(rows).from_arrays(columns, schema=schema)


def _columns_of(conditions: Any) -> tuple[str, ...]:
    """The columns that a filter names."""
    found: list[str] = []
    for condition in conditions:
        if isinstance(condition, tuple) and len(condition) == 3 and isinstance(condition[0], str):
            found.append(condition[0])
        elif isinstance(condition, list):
            found += _columns_of(condition)
        else:
            raise GraphError(
                f"Load: filter must be a list of (column, operator, value), or of such lists, got {shown(condition)} "
                "in it. What cannot be said so is a Filter behind Load"
            )
    return tuple(dict.fromkeys(found))


def _arrow_rows(table: Any, name: str, fill: Mapping[str, Any], *kept: Any) -> ArrowRows:
    fills = {
        column: filling(value, table.schema.field(column).type, column, "Load")
        for column, value in fill.items()
        if column in table.schema.names
    }
    return ArrowRows(table, name, fills, True, *kept)


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
