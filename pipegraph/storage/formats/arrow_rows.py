"""Rows of Arrow batches by number: as samples, or as columns, whose numbers never become Python's one by one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipegraph.columns import Columns, pack
from pipegraph.errors import ShardError

from .arrowvalues import Convert, arrow_errors, converter
from .shard_format import BlockSamples, Sample

Int64Array = npt.NDArray[np.int64]


class ArrowRows(BlockSamples["Sample | None"]):
    """Rows of batches of one schema, laid end to end.

    Args:
        name: of the file, for errors.
        fill: by column, what is in place of its nulls; see ``arrowvalues.filling``.
        copied: whether arrays own their values.
        kept: the places of these rows among all that are counted, if a filter left some out: the others are None.
        count: how many are counted.
    """

    def __init__(
        self,
        table: Any,
        name: str,
        fill: Mapping[str, Any],
        copied: bool,
        kept: Int64Array | None = None,
        count: int = -1,
    ) -> None:
        self._name, self._fill, self._kept = name, fill, kept
        self._count = table.num_rows if count < 0 else count
        self._convert: dict[str, Convert] = {
            field.name: converter(field.type, copied, fill.get(field.name)) for field in table.schema
        }
        kinds = {field.name: _number(field.type) for field in table.schema}
        self._numbers = {name: kind for name, kind in kinds.items() if kind is not None}
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._arrays: list[dict[str, Any]] = [{} for _ in self._batches]  # made when they are asked for
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int) -> Sample | None:
        if self._kept is not None:
            at = int(np.searchsorted(self._kept, index))
            if at == len(self._kept) or self._kept[at] != index:
                return None
            index = at
        return self.rows(np.array([index]))[0]

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
        if self._kept is not None:
            return None
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
                arrays[name] = self._array(batch.column(name), name, kind)
            if arrays[name] is None:
                return None
            found[places] = arrays[name][local]
        return found

    def _array(self, column: Any, name: str, kind: type) -> Any:
        if column.null_count:
            value = self._fill.get(name)
            if value is not None:
                column = column.fill_null(value)
            elif kind is not float:
                return None
        return column.to_numpy(zero_copy_only=False)

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
