"""Finds the row groups of a Parquet file from its footer.

Our own reader, since pyarrow ends the process (``std::terminate``) when its metadata is asked
for a column of a damaged footer; its reading of the data itself gives errors, as it should.
The footer is Thrift's compact protocol ("Thrift compact protocol encoding" in the Thrift
project) over the structs of parquet-format's ``parquet.thrift``; fields that are not needed are skipped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pipegraph.errors import ShardError
from pipegraph.storage.shard_files import ShardFile

# Field numbers in parquet.thrift.
_SCHEMA, _ROWS, _ROW_GROUPS = 2, 3, 4  # of FileMetaData, which has all of them in every file
_COLUMNS, _NUM_ROWS = 1, 3  # of RowGroup
_FILE_PATH, _META_DATA = 1, 3  # of ColumnChunk
_COMPRESSED_NBYTES, _DATA_OFFSET, _DICTIONARY_OFFSET = 7, 9, 11  # of ColumnMetaData

_MAX_DEPTH: Final = 32


class RowGroup(NamedTuple):
    """Bytes ``start..stop`` of the file, and how many rows they hold."""

    start: int
    stop: int
    rows: int


def row_groups(file: ShardFile) -> list[RowGroup]:
    """The row groups in their order."""
    tail = file.read_at(max(0, file.size - 8), min(8, file.size))
    nbytes = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or nbytes + 12 > file.size:
        raise ShardError(f"{file.name}: not a Parquet file: its end is {tail!r}")
    try:
        footer = _Compact(file.read_at(file.size - 8 - nbytes, nbytes)).struct()
        if not footer[_SCHEMA]:
            raise ValueError("no schema")
        groups = [_row_group(group, file.size) for group in footer[_ROW_GROUPS]]
        if sum(group.rows for group in groups) != footer[_ROWS]:
            raise ValueError(f"{footer[_ROWS]} rows in all, {sum(g.rows for g in groups)} in its row groups")
        return groups
    except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ShardError(f"{file.name}: broken Parquet footer: {error}") from error


def _row_group(group: dict[int, Any], size: int) -> RowGroup:
    rows, starts, stops = group[_NUM_ROWS], [], []
    for column in group.get(_COLUMNS, []):
        if _FILE_PATH in column:
            raise ValueError("a column lies in another file")
        meta = column[_META_DATA]
        start = min(meta[_DATA_OFFSET], meta.get(_DICTIONARY_OFFSET) or meta[_DATA_OFFSET])
        starts.append(start)
        stops.append(start + meta[_COMPRESSED_NBYTES])
    start, stop = min(starts, default=0), max(stops, default=0)
    if rows < 0 or not 0 <= start <= stop <= size:
        raise ValueError(f"a row group of {rows} rows in bytes {start}..{stop} of {size}")
    return RowGroup(start, stop, rows)


class _Compact:
    """Thrift's compact protocol; structs as dicts by field number. Each value takes a byte: lengths that lie end
    early.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self._depth = data, 0, 0

    def struct(self) -> dict[int, Any]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            fields[number] = kind == 1 if kind <= 2 else self._value(kind)
        self._depth -= 1
        return fields

    def _value(self, kind: int) -> Any:
        match kind:
            case 1 | 2 | 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._zigzag()
            case 7:
                return self._bytes(8)
            case 8:
                return self._bytes(self._varint())
            case 9 | 10:
                head = self._byte()
                count = head >> 4 if head >> 4 < 15 else self._varint()
                return [self._element(head & 15) for _ in range(count)]
            case 11:
                count = self._varint()
                kinds = self._byte() if count else 0
                return [(self._element(kinds >> 4), self._element(kinds & 15)) for _ in range(count)]
            case 12:
                return self.struct()
            case 13:
                return self._bytes(16)
        raise ValueError(f"unknown type {kind}")

    def _element(self, kind: int) -> Any:
        self._depth += 1  # lists of lists nest without a struct between
        if self._depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        value = self._value(kind)
        self._depth -= 1
        return value

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _bytes(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._data):
            raise IndexError("ends early")
        value = self._data[self._at : end]
        self._at = end
        return value

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number longer than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
