"""Rows of Arrow batches by number: as samples, or as columns, whose numbers never become Python's one by one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pipegraph.columns import Columns, pack
from pipegraph.errors import ShardError

from .shard_format import BlockSamples, Sample

_TEXT_OR_BYTES = ("string", "large_string", "binary", "large_binary", "fixed_size_binary")

Convert = Callable[[Any], list[Any]]
"""A column to its values. Nulls of floats are NaN, also inside lists; all others are None."""


def arrow_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for data that is not what it says."""
    arrow = importlib.import_module("pyarrow")
    return (arrow.ArrowException, OSError, MemoryError, ValueError, OverflowError)


def converter(kind: Any, copied: bool = True) -> Convert:
    """How columns of an Arrow type are turned to values.

    Arrays own their values, unless not ``copied``: then they lie in Arrow's memory where their type allows, read-only.
    What is returned raises ShardError for a list of integers or bools with a null inside, for which NumPy has no value.
    """
    convert = _with_none(kind, copied)
    if not is_float(kind):
        return convert
    return lambda column: [math.nan if value is None else value for value in convert(column)]


def nulls_inside(column: Any) -> int:
    """The nulls inside a column's lists of integers or bools."""
    kind = column.type
    if not _is_array(kind) or importlib.import_module("pyarrow").types.is_floating(kind.value_type):
        return 0
    return sum(chunk.flatten().null_count for chunk in column.chunks)


def _with_none(kind: Any, copied: bool) -> Convert:
    arrow = importlib.import_module("pyarrow")
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        stored = _with_none(kind.storage_type, copied)
        return lambda column: stored(column.storage)
    if types.is_dictionary(kind) and not str(kind.value_type).startswith(_TEXT_OR_BYTES):
        values = _with_none(kind.value_type, copied)
        return lambda column: values(column.dictionary_decode())
    timed = types.is_timestamp(kind) or types.is_duration(kind) or types.is_time64(kind)
    if timed and kind.unit == "ns":
        return _times
    if _is_array(kind):
        nullable = types.is_floating(kind.value_type)
        return lambda column: _arrays(column, nullable, copied)
    plain: Convert = lambda column: column.to_pylist()  # noqa: E731
    return plain


def is_float(kind: Any) -> bool:
    """Whether values of an Arrow type are floats, which have NaN for what is missing."""
    arrow = importlib.import_module("pyarrow")
    if isinstance(kind, arrow.BaseExtensionType):
        return is_float(kind.storage_type)
    return is_float(kind.value_type) if arrow.types.is_dictionary(kind) else arrow.types.is_floating(kind)


def _is_array(kind: Any) -> bool:
    types = importlib.import_module("pyarrow").types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    value = kind.value_type
    return bool(types.is_integer(value) or types.is_floating(value) or types.is_boolean(value))


def _times(column: Any) -> list[Any]:
    """Python's own types have microseconds only."""
    arrow = importlib.import_module("pyarrow")
    if arrow.types.is_time64(column.type):
        column = column.cast(arrow.int64()).cast(arrow.duration("ns"))
    found = column.to_numpy(zero_copy_only=False)
    return [
        value if valid else None for value, valid in zip(found, column.is_valid().to_pylist(), strict=True)
    ]


def _arrays(column: Any, nullable: bool, copied: bool) -> list[Any]:
    found: list[Any] = []
    for value in column:
        if not value.is_valid:
            found.append(None)
            continue
        numbers = value.values
        if numbers.null_count and not nullable:
            raise ShardError(
                f"a list of {column.type.value_type} has a null inside, for which a NumPy array has no value; write "
                "the column as floats or without nulls, or leave it out with columns="
            )
        array = numbers.to_numpy(zero_copy_only=False)
        # Copied: Arrow's memory is read-only, and would be kept by each of its rows.
        found.append(array.copy() if copied else array)
    return found


Int64Array = npt.NDArray[np.int64]


class ArrowRows(BlockSamples[Sample]):
    """Rows of batches of one schema, laid end to end.

    Args:
        name: of the file, for errors.
        copied: whether arrays own their values.
    """

    at_once = 256

    def __init__(self, table: Any, name: str, copied: bool) -> None:
        self._name, self._count = name, int(table.num_rows)
        self._convert: dict[str, Convert] = {
            field.name: converter(field.type, copied) for field in table.schema
        }
        kinds = {field.name: _number(field.type) for field in table.schema}
        self._numbers = {name: kind for name, kind in kinds.items() if kind is not None}
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._arrays: list[dict[str, Any]] = [{} for _ in self._batches]  # made when they are asked for
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int) -> Sample:
        return self.rows(np.array([index]))[0]

    def run(self, start: int, stop: int) -> list[Sample]:
        return self.rows(np.arange(start, stop))

    def rows(self, numbers: Int64Array) -> list[dict[str, Any]]:
        """The rows with these numbers, in their order."""
        groups = list(self._by_batch(numbers))
        columns = []
        for name in self._convert:
            found = self._gathered(name, groups, len(numbers))
            columns.append(self._values(name, groups, len(numbers)) if found is None else found.tolist())
        names = list(self._convert)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def columns(self, numbers: Int64Array) -> Columns | None:
        """As :meth:`rows`, packed for a ``Batch``; None where a column has values that cannot be."""
        groups = list(self._by_batch(numbers))
        made: dict[Any, Columns] = {}
        for name in self._convert:
            kind = self._numbers.get(name)
            if kind is None:
                column = pack(self._values(name, groups, len(numbers)))
            else:
                found = self._gathered(name, groups, len(numbers))
                column = None if found is None else Columns(kind, found)
            if column is None:
                return None
            made[name] = column
        return Columns(dict, made)

    def _by_batch(self, numbers: Int64Array) -> Iterator[tuple[Any, dict[str, Any], Any, Int64Array]]:
        """``(batch, its arrays, places among the numbers, numbers in the batch)`` of each batch that is needed."""
        if not len(numbers):
            return
        if len(self._batches) == 1:
            yield self._batches[0], self._arrays[0], np.arange(len(numbers)), numbers
            return
        batches = np.searchsorted(self._starts, numbers, "right") - 1
        order = np.argsort(batches, kind="stable")
        ends = np.flatnonzero(np.diff(batches[order])) + 1
        for places in np.split(order, ends):
            batch = int(batches[places[0]])
            yield self._batches[batch], self._arrays[batch], places, numbers[places] - self._starts[batch]

    def _gathered(self, name: str, groups: list[Any], count: int) -> Any:
        """A column's numbers, of the dtype of a batch of Python's; None for other values, and for nulls without one."""
        kind = self._numbers.get(name)
        if kind is None:
            return None
        found = np.empty(count, _DTYPES[kind])
        for batch, arrays, places, local in groups:
            if name not in arrays:
                column = batch.column(name)
                lost = column.null_count and kind is not float
                arrays[name] = None if lost else column.to_numpy(zero_copy_only=False)
            if arrays[name] is None:
                return None
            found[places] = arrays[name][local]
        return found

    def _values(self, name: str, groups: list[Any], count: int) -> list[Any]:
        found: list[Any] = [None] * count
        try:
            for batch, _, places, local in groups:
                values = self._convert[name](_taken(batch.column(name), local))
                for place, value in zip(places.tolist(), values, strict=True):
                    found[place] = value
        except ShardError as error:
            raise ShardError(f"{self._name}, column {name!r}: {error}") from None
        except arrow_errors() as error:  # such as text that is no UTF-8
            raise ShardError(
                f"{self._name}, column {name!r}: a value is not of its column's type: {error}"
            ) from error
        return found


_DTYPES: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}


def _number(kind: Any) -> type | None:
    """The type of a column's values, if they are numbers of which a batch is one tensor."""
    types = importlib.import_module("pyarrow").types
    if types.is_boolean(kind):
        return bool
    if types.is_floating(kind):
        return float
    return int if types.is_integer(kind) and not types.is_uint64(kind) else None


def _taken(column: Any, local: Int64Array) -> Any:
    first, count = int(local[0]), len(local)
    if int(local[-1]) - first == count - 1 and (count < 3 or bool((np.diff(local) == 1).all())):
        return column.slice(first, count)  # a run is not copied
    return column.take(importlib.import_module("pyarrow").array(local))
