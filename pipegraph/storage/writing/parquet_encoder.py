"""Parquet shards through pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO, Final

import numpy as np

from pipegraph.errors import DataError, extra_module
from pipegraph.storage.formats.mds import SCALARS

from .encoder import UNDECIDED, Encoder, Kinds, Sample, fitted, kind_in, nbytes_of, refuse_other_fields

_ARRAY_DTYPES: Final = ("bool", *SCALARS)
"""Those that come back as arrays: lists of times would be read as lists."""

GROUP_NBYTES: Final = 16_000_000
"""About what a row group holds before it is encoded: readers decode whole ones."""


class ParquetEncoder(Encoder):
    """One column per field, in the order of the fields; values that are None are nulls, JSON is text."""

    format = "parquet"
    shard_name = "shard-{:06d}.parquet"

    def __init__(self, kinds: Kinds | None = None) -> None:
        super().__init__(kinds)
        self._arrow = extra_module("pyarrow", "shards", "writing Parquet")
        self._parquet = extra_module("pyarrow.parquet", "shards", "writing Parquet", "pyarrow")
        self._schema = self._made_schema() if kinds else None  # fixed with the first row group

    def _made_schema(self) -> Any:
        return self._arrow.schema([(name, self._type(name, kind)) for name, kind in self.kinds.items()])

    def _type(self, field: str, kind: str) -> Any:
        arrow = self._arrow
        name, _, dtype = kind.partition(":")
        if name == "array":
            if dtype not in _ARRAY_DTYPES:
                raise DataError(
                    f"field {field!r}: Parquet has no arrays of {dtype}; convert them, times with .astype('int64')"
                )
            return arrow.list_(arrow.from_numpy_dtype(np.dtype(dtype)))
        plain = {
            "bytes": arrow.binary(),
            "bool": arrow.bool_(),
            "int": arrow.int64(),
            "float": arrow.float64(),
        }
        return arrow.null() if name == "null" else plain.get(name, arrow.string())

    def encode(self, sample: Sample, number: int) -> list[Any]:
        if not self.kinds:
            self.kinds = dict.fromkeys(sample, "null")
        refuse_other_fields(sample, self.kinds, number)
        row = []
        for field, kind in self.kinds.items():
            value = sample.get(field)
            if field == "key" and value is None:
                value = f"{number:09d}"
            if kind in UNDECIDED and self._schema is None:
                found = kind_in(field, value)
                if found != "null" and (kind == "null" or found.startswith(("array", "json"))):
                    self._type(field, found)
                    self.kinds[field] = kind = found
            value = fitted(value, kind, field)
            try:
                if value.__class__ is int and kind == "int":
                    value.to_bytes(8, "little", signed=True)
                elif value.__class__ is str:
                    value.encode()
            except (OverflowError, UnicodeEncodeError) as error:
                raise DataError(
                    f"sample {number}: field {field!r}: a value has no place in its Parquet column "
                    f"({self._type(field, kind)}): {error}; write it as {'text' if kind == 'int' else 'bytes'}"
                ) from error
            if isinstance(value, np.ndarray) and value.ndim != 1:
                raise DataError(
                    f"field {field!r}: Parquet keeps lists of numbers, not arrays of shape {value.shape}; write tar, "
                    "or flatten them"
                )
            # Rows wait for their group, and the loop may use its array for the next sample.
            row.append(value.copy() if isinstance(value, np.ndarray) else value)
        if not row:
            raise DataError(f"sample {number} has no fields: without a column Parquet has no rows")
        return row

    def size(self, encoded: list[Any]) -> int:
        return sum(map(nbytes_of, encoded))

    def begin(self, file: BinaryIO) -> None:
        self._file = file
        self._writer: Any = None
        self._rows: list[list[Any]] = []
        self._held = self.samples = 0

    def add(self, encoded: list[Any]) -> None:
        self._rows.append(encoded)
        self._held += self.size(encoded)
        self.samples += 1
        if self._held >= GROUP_NBYTES:
            self._flush()

    def _flush(self) -> None:
        if self._schema is None:
            self._schema = self._made_schema()
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._file, self._schema, write_page_checksum=True)
        columns = []
        for column, field in zip(zip(*self._rows, strict=True), self._schema, strict=True):
            try:
                columns.append(self._arrow.array(_texts(column, field.type), field.type))
            except (self._arrow.ArrowException, OverflowError, ValueError) as error:
                raise DataError(
                    f"field {field.name!r}: a value has no place in its Parquet column ({field.type}): {error}"
                ) from error
        table = self._arrow.table(columns, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, len(self._rows)))
        self._rows, self._held = [], 0

    def finish(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()


def _texts(column: Sequence[Any], kind: Any) -> list[Any]:
    """Values of a column; of one of JSON, lists that came before it was known to be one as their text."""
    return ["[]" if str(kind) == "string" and isinstance(value, list) else value for value in column]
