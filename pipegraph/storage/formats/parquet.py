"""Parquet through pyarrow; row groups are the blocks."""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final, final, overload

from pipegraph.errors import MissingExtraError, ShardError
from pipegraph.storage.files import ShardFile

from .base import BLOCK_NBYTES, MAX_UNPACKED_NBYTES, Block, Format, Sample
from .parquetfooter import row_groups

_BATCH_ROWS: Final = 256


@final
class ParquetFormat(Format):
    """Each row is a sample: one field per column, with Parquet's types.

    Numbers, strings and bytes become Python's; lists of numbers become numpy
    arrays; other nested values become lists and dicts. Neighbouring small row
    groups share a block. Extension types are read as what they are stored as.
    """

    suffixes = (".parquet",)

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        with _open(file) as reader:
            for group in range(reader.metadata.num_row_groups):
                _check_group(reader, group, file.name)
                try:
                    for batch in reader.iter_batches(_BATCH_ROWS, row_groups=[group]):
                        yield from _rows(batch, file.name)
                except _arrow_errors() as error:
                    raise ShardError(f"{file.name}: row group {group} is broken: {error}") from error

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        block: Block | None = None
        for start, stop, rows in row_groups(file):
            if block and rows and start >= block.offset and stop - block.offset <= block_nbytes:
                nbytes = max(stop, block.offset + block.nbytes) - block.offset
                block = Block(block.offset, nbytes, block.first, block.samples + rows)
            elif rows:
                if block:
                    yield block
                block = Block(start, stop - start, block.first + block.samples if block else 0, rows)
        if block:
            yield block

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        with _open(file) as reader:
            groups, first = [], 0
            for group in range(reader.metadata.num_row_groups):
                if first >= block.first and first < block.first + block.samples:
                    _check_group(reader, group, file.name)
                    groups.append(group)
                first += reader.metadata.row_group(group).num_rows
            try:
                batches = list(reader.iter_batches(_BATCH_ROWS, row_groups=groups)) if groups else []
            except _arrow_errors() as error:
                raise ShardError(f"{file.name}: row groups {groups} are broken: {error}") from error
        rows = _Rows(batches, file.name)
        if len(rows) != block.samples:
            raise ShardError(
                f"{file.name}: the block at row {block.first} holds {len(rows)} rows, its index says "
                f"{block.samples}; make the index anew"
            )
        return rows


@final
class _Rows(Sequence[Sample]):
    """Rows of Arrow batches, turned to Python when asked for."""

    def __init__(self, batches: Sequence[Any], name: str) -> None:
        self._batches, self._name = batches, name
        self._ends = []
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            self._ends.append(rows)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"block of {len(self)} samples has no sample {index}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        batch = self._batches[number]
        return _rows(batch.slice(index - (self._ends[number] - batch.num_rows), 1), self._name)[0]


def _rows(batch: Any, name: str) -> list[Sample]:
    try:
        columns = [_values(column) for column in batch.columns]
    except _arrow_errors() as error:  # such as text that is no UTF-8
        raise ShardError(f"{name}: a value is not of its column's type: {error}") from error
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    arrow = importlib.import_module("pyarrow")
    types = arrow.types
    if isinstance(column.type, arrow.BaseExtensionType):
        column = column.storage
    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_numbers = is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type))
    # With nulls inside, numbers would turn to floats: those stay lists.
    if is_numbers and column.flatten().null_count == 0:
        return [v.values.to_numpy().copy() if v.is_valid else None for v in column]
    values: list[Any] = column.to_pylist()
    return values


def _open(file: ShardFile) -> Any:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("pyarrow", "shards", f"reading {file.name}") from error
    try:
        # Pages that carry a CRC are checked.
        reader = parquet.ParquetFile(file.open_raw(), page_checksum_verification=True)
        names = reader.schema_arrow.names
    except _arrow_errors() as error:
        raise ShardError(f"{file.name}: not a Parquet file: {error}") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        reader.close()
        raise ShardError(f"{file.name}: has two columns {twice!r}; a sample's fields need names of their own")
    return reader


def _arrow_errors() -> tuple[type[Exception], ...]:
    arrow = importlib.import_module("pyarrow")
    return (arrow.ArrowException, OSError, MemoryError, ValueError, OverflowError)


def _check_group(reader: Any, group: int, name: str) -> None:
    nbytes = reader.metadata.row_group(group).total_byte_size
    if nbytes > MAX_UNPACKED_NBYTES:
        raise ShardError(
            f"{name}: row group {group} says it unpacks to {nbytes} bytes, more than {MAX_UNPACKED_NBYTES}; "
            "write smaller row groups"
        )
