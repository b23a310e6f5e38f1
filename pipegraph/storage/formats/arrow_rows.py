"""Rows of an Arrow IPC file, each read from its place: numbers, texts, bytes, lists and structs without compression.

LitData keeps dicts of plain values so, behind a table of offsets without samples. A file is a magic word and messages:
a schema, then batches of rows. A message gives its length, then (as a flatbuffer) what its buffers are and where they
begin.
"""

from __future__ import annotations

import importlib
import itertools
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pipegraph.errors import DataError, PipegraphError, ShardError, extra_module
from pipegraph.storage.shard_files import ShardFile

from .arrowvalues import arrow_errors
from .shard_format import Block, BlockSamples, Sample

_FILE: Final = b"ARROW1\0\0"
_SCHEMA, _BATCH = 1, 3
_MAX_METADATA_NBYTES: Final = 1 << 24
_MAX_EMPTY: Final = 1 << 20
"""Values without bytes of their own in one list: more are an attack."""

Values = Callable[[int, int], list[Any]]
"""The values of a column in a range of its rows."""


@dataclass(frozen=True)
class IpcMessage:
    """One message: where it, its buffers and what follows begin; its kind; and its flatbuffer, whose table is at
    `at`.
    """

    start: int
    body: int
    stop: int
    kind: int
    metadata: bytes
    at: int

    @property
    def rows(self) -> int:
        place = _field(self.metadata, self.at, 0)
        return _int64(self.metadata, place) if place else 0


def blocks_of_rows(file: ShardFile, start: int, stop: int, rows: int, block_nbytes: int) -> Iterator[Block]:
    """Runs of whole batches of about ``block_nbytes``."""
    fields = _fields(file, start, stop)
    first = count = 0
    begin = end = -1
    for message in itertools.islice(_messages(file, start, stop), 1, None):
        _columns(file, fields, message)
        if first < count and message.stop - begin > block_nbytes:
            yield Block(begin, end - begin, first, count - first)
            first, begin = count, -1
        begin, end, count = message.start if begin < 0 else begin, message.stop, count + message.rows
    if count != rows:
        raise ShardError(
            f"{file.name}: holds {count} rows, its table says {rows}; it was cut short or is another file"
        )
    if first < count:
        yield Block(begin, end - begin, first, count - first)


class ArrowRows(BlockSamples[Sample]):
    """The rows of one block; each is read from its own bytes."""

    def __init__(self, file: ShardFile, start: int, stop: int, block: Block) -> None:
        self._name = file.name
        fields = _fields(file, start, stop)
        self._batches: list[Values] = []
        self._ends: list[int] = []
        for message in _messages(file, block.offset, block.offset + block.nbytes):
            self._batches.append(_columns(file, fields, message))
            self._ends.append(len(self) + message.rows)
            self.nbytes = max(0, self.nbytes) + 4 * len(message.metadata)
        block.check(f"{file.name}: the block at byte {block.offset}", len(self), "rows")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def sample(self, index: int) -> Sample:
        return self.run(index, index + 1)[0]

    def run(self, start: int, stop: int) -> list[Sample]:
        found: list[Sample] = []
        while start < stop:
            number = bisect_right(self._ends, start)
            first = self._ends[number - 1] if number else 0
            end = min(stop, self._ends[number])
            try:
                found += self._batches[number](start - first, end - first)
            except PipegraphError:  # the bytes could not be had
                raise
            except ValueError as error:
                raise ShardError(f"{self._name}: rows {start}..{end} of a block: {error}") from error
            start = end
        return found


def _messages(file: ShardFile, at: int, stop: int) -> Iterator[IpcMessage]:
    """The messages from here on, up to the mark that ends them."""
    if at + 8 <= stop and file.read_at(at, 8) == _FILE:
        at += 8
    while at + 8 <= stop:
        mark, length = struct.unpack("<Ii", file.read_at(at, 8))
        if mark != 0xFFFFFFFF or not 0 <= length <= min(_MAX_METADATA_NBYTES, stop - at - 8):
            raise ShardError(f"{file.name}, byte {at}: no message of an Arrow stream")
        if length == 0:
            return
        metadata = file.read_at(at + 8, length)
        try:
            table = _pointed(metadata, 0)
            kind, header, nbytes = (_field(metadata, table, n) for n in (1, 2, 3))
            found = metadata[kind] if kind else 0
            body = _int64(metadata, nbytes) if nbytes else 0
            header = _pointed(metadata, header)
        except (ValueError, IndexError, struct.error) as error:
            raise ShardError(f"{file.name}, byte {at}: broken message of an Arrow stream: {error}") from error
        end = at + 8 + length + body
        if body < 0 or end > stop:
            raise ShardError(
                f"{file.name}: the Arrow message at byte {at} ends behind its file; it was cut short"
            )
        yield IpcMessage(at, at + 8 + length, end, found, metadata, header)
        at = end


def _fields(file: ShardFile, start: int, stop: int) -> list[tuple[str, Any]]:
    """Name and Arrow type of each column."""
    arrow = extra_module("pyarrow", "shards", f"reading {file.name}")
    schema = next(_messages(file, start, stop), None)
    if schema is None or schema.kind != _SCHEMA:
        raise ShardError(f"{file.name}, byte {start}: no schema of Arrow rows")
    data = file.read_at(schema.start, schema.body - schema.start)
    try:
        found = arrow.ipc.read_schema(arrow.py_buffer(data))
        return [(field.name, field.type) for field in found]
    except arrow_errors() as error:
        raise ShardError(f"{file.name}, byte {start}: broken schema of Arrow rows: {error}") from error


def _columns(file: ShardFile, fields: list[tuple[str, Any]], batch: IpcMessage) -> Values:
    """What reads the rows of a batch."""
    if batch.kind != _BATCH:
        raise DataError(
            f"{file.name}: holds more in Arrow's form than batches of rows (dictionaries, for example), which is not "
            "read here; optimize the data anew with plain values"
        )
    try:
        if _field(batch.metadata, batch.at, 3):
            raise DataError(
                f"{file.name}: its rows are compressed inside Arrow's batches, which is not read here; optimize "
                "without compression="
            )
        nodes, buffers = (_pairs(batch.metadata, batch.at, n) for n in (1, 2))
        return _ColumnReader(file, batch, nodes, buffers).struct(fields, batch.rows)
    except DataError:
        raise
    except (ValueError, struct.error, StopIteration) as error:
        raise ShardError(f"{file.name}, byte {batch.start}: broken batch of Arrow rows: {error!r}") from error


class _ColumnReader:
    """Makes the columns of one batch, in the order in which their nodes and buffers come."""

    def __init__(
        self,
        file: ShardFile,
        batch: IpcMessage,
        nodes: Iterator[tuple[int, int]],
        buffers: Iterator[tuple[int, int]],
    ) -> None:
        self._file, self._batch = file, batch
        self._nodes, self._buffers = nodes, buffers

    def _buffer(self) -> Callable[[int, int], bytes]:
        """Reads a range of the next buffer."""
        offset, nbytes = next(self._buffers)
        start, space, file = self._batch.body + offset, self._batch.stop - self._batch.body, self._file
        if offset < 0 or nbytes < 0 or offset + nbytes > space:
            raise ValueError(f"a buffer of {nbytes} bytes at {offset} lies outside the {space} of its batch")

        def read(at: int, count: int) -> bytes:
            if at < 0 or count < 0 or at + count > nbytes:
                raise ValueError(f"bytes {at}..{at + count} of a buffer of {nbytes}")
            return file.read_at(start + at, count)

        return read

    def column(self, kind: Any, nested: bool = False) -> tuple[Values, int]:
        """The values of the next column, and how many there are.

        As in Parquet nulls of floats are NaN, also in lists of floats, but not in other ``nested`` values.
        """
        rows, nulls = next(self._nodes)
        types = importlib.import_module("pyarrow").types
        if types.is_null(kind):
            return _bounded(rows, lambda start, stop: [None] * (stop - start)), rows
        has, null = self._buffer(), math.nan if types.is_floating(kind) and not nested else None
        values: Values
        if types.is_boolean(kind):
            bits = self._buffer()
            values = lambda start, stop: _bits(bits, start, stop)  # noqa: E731
        elif types.is_integer(kind) or types.is_floating(kind):
            values = self._numbers(np.dtype(kind.to_pandas_dtype()))
        elif types.is_string(kind) or types.is_binary(kind):
            values = self._texts(types.is_string(kind))
        elif types.is_list(kind):
            values = self._lists(kind.value_type, nested)
        elif types.is_struct(kind):
            values = self.struct([(field.name, field.type) for field in kind], rows, True)
        else:
            raise DataError(
                f"{self._file.name}: a column of Arrow's type {kind} is not read here; optimize the data anew with "
                "numbers, texts, bytes, lists or dicts"
            )

        def with_nulls(start: int, stop: int) -> list[Any]:
            found = values(start, stop)
            if not nulls:
                return found
            return [
                value if there else null for value, there in zip(found, _bits(has, start, stop), strict=True)
            ]

        return with_nulls, rows

    def struct(self, fields: list[tuple[str, Any]], rows: int, nested: bool = False) -> Values:
        names = [name for name, _ in fields]
        if rows < 0:
            raise ValueError(f"{rows} rows")
        if len(set(names)) != len(names):
            raise ValueError(f"two fields of one name among {names}")
        columns = [self.column(kind, nested) for _, kind in fields]
        if any(count != rows for _, count in columns):
            raise ValueError("columns of unequal length")

        def values(start: int, stop: int) -> list[Any]:
            if not columns:
                return [{} for _ in range(start, stop)]
            found = [read(start, stop) for read, _ in columns]
            return [dict(zip(names, row, strict=True)) for row in zip(*found, strict=True)]

        return values if columns else _bounded(rows, values)

    def _numbers(self, dtype: np.dtype[Any]) -> Values:
        read, size = self._buffer(), dtype.itemsize
        return lambda start, stop: np.frombuffer(read(start * size, (stop - start) * size), dtype).tolist()

    def _texts(self, decoded: bool) -> Values:
        ends, read = self._buffer(), self._buffer()

        def values(start: int, stop: int) -> list[Any]:
            at = _ends(ends, start, stop)
            data = read(at[0], at[-1] - at[0])
            found = [data[a - at[0] : b - at[0]] for a, b in itertools.pairwise(at)]
            return [each.decode() for each in found] if decoded else found

        return values

    def _lists(self, kind: Any, nested: bool) -> Values:
        ends, numbers = self._buffer(), importlib.import_module("pyarrow").types.is_floating(kind)
        read, rows = self.column(kind, nested or not numbers)

        def values(start: int, stop: int) -> list[Any]:
            at = _ends(ends, start, stop)
            if at[-1] > rows:
                raise ValueError(f"a list ends at value {at[-1]} of {rows}")
            found = read(at[0], at[-1])
            return [found[a - at[0] : b - at[0]] for a, b in itertools.pairwise(at)]

        return values


def _bounded(rows: int, values: Values) -> Values:
    if rows > _MAX_EMPTY:
        raise ValueError(f"{rows} values without bytes of their own, more than {_MAX_EMPTY}")
    return values


def _bits(read: Callable[[int, int], bytes], start: int, stop: int) -> list[bool]:
    first = start // 8
    found = np.unpackbits(np.frombuffer(read(first, -(-stop // 8) - first), np.uint8), bitorder="little")
    bits: list[bool] = found[start - 8 * first : stop - 8 * first].astype(bool).tolist()
    return bits


def _ends(read: Callable[[int, int], bytes], start: int, stop: int) -> list[int]:
    """Where each value of a range begins, and where the last one ends."""
    found = np.frombuffer(read(4 * start, 4 * (stop - start + 1)), "<i4")
    if found[0] < 0 or (np.diff(found) < 0).any():
        raise ValueError("the places of values are not in order")
    places: list[int] = found.tolist()
    return places


# Flatbuffers: a table begins with the distance to its list of fields, which has the distance of each from the table.


def _pointed(data: bytes, place: int) -> int:
    """What the distance at a place leads to."""
    at: int = place + struct.unpack_from("<I", data, place)[0]
    if not place < at < len(data):
        raise ValueError("a distance that leads nowhere")
    return at


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table lies; 0 where it has none."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if fields < 0:
        raise ValueError("a table without fields")
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    distance: int = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]
    return table + distance if distance else 0


def _int64(data: bytes, place: int) -> int:
    value: int = struct.unpack_from("<q", data, place)[0]
    return value


def _pairs(data: bytes, table: int, number: int) -> Iterator[tuple[int, int]]:
    """A field that is a list of pairs of int64."""
    place = _field(data, table, number)
    if not place:
        return
    at = _pointed(data, place)
    count = struct.unpack_from("<I", data, at)[0]
    found = np.frombuffer(data, "<i8", 2 * count, at + 4).reshape(count, 2)
    yield from map(tuple, found.tolist())
