"""Samples as columns: each field of several samples in one array. The one way in which samples become a batch.
And samples as the bytes that their shards have of them, decoded where somebody first looks at them: a process that
works on lines gets these, not objects that were made of them in the trainer.

The stage that makes rows packs them at once, in the thread that made them: then one array travels instead of a
thousand small objects, and is counted as one buffer. What ``Batch`` was given as rows it packs itself;
``pipegraph.operators.collate`` makes the batch of the columns. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any

import numpy as np
import torch

from pipegraph.tree import buffers, is_dataclass_value, is_namedtuple

SCALARS: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}
ARRAYS = frozenset({np.ndarray, np.memmap})
AS_IN_TORCH = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))
"""Not those of another byte order, nor the long ones."""
_TEXTS = frozenset({bytes, str})
_shape, dtype_of = attrgetter("shape"), attrgetter("dtype")


class Columns:
    """Several samples.

    Attributes:
        kind: the type of each sample; None for samples that have no columns, which are kept as they are.
        data: for tensors a tensor (samples, ...); for arrays and numbers an array: to cut and to free a tensor gives
            up the GIL, and with it the turn. For bytes and str a list, for containers a dict of columns by name or
            place.
        items: the samples; None where only the columns are kept, of plain dicts and tuples.
    """

    __slots__ = ("data", "items", "kind")

    def __init__(self, kind: type | None, data: Any, items: Sequence[Any] | None = None) -> None:
        self.kind = kind
        self.data = data
        self.items = items

    def __len__(self) -> int:
        data = self.data
        return len(next(iter(data.values())) if isinstance(data, dict) else data)

    @property
    def parts(self) -> list[Columns]:
        """What it is of, as of ``PackedParts``."""
        return [self]

    def part(self, start: int, stop: int) -> Columns:
        """Samples ``start`` to ``stop``, in the same memory."""
        data = self.data
        if isinstance(data, dict):
            return Columns(self.kind, {name: column.part(start, stop) for name, column in data.items()})
        return Columns(self.kind, data[start:stop])

    def copy(self) -> Columns:
        """The same samples, in memory of their own."""
        data = self.data
        if isinstance(data, dict):
            return Columns(self.kind, {name: column.copy() for name, column in data.items()})
        if isinstance(data, list):
            return self
        return Columns(self.kind, data.clone() if isinstance(data, torch.Tensor) else data.copy())

    def take(self, indices: Any) -> Columns:
        """The samples with these int64 indices, in their order and in memory of their own."""
        data = self.data
        if isinstance(data, dict):
            return Columns(self.kind, {name: column.take(indices) for name, column in data.items()})
        if isinstance(data, list):
            return Columns(self.kind, [data[index] for index in indices.tolist()])
        return Columns(self.kind, data[indices])

    @staticmethod
    def joined(parts: Sequence[Columns]) -> Columns | None:
        """Several laid end to end; None where they are not alike."""
        first = parts[0]
        if len(parts) == 1:
            return first
        if not fit(parts):
            return None
        if isinstance(first.data, dict):
            made = {name: Columns.joined([part.data[name] for part in parts]) for name in first.data}
            return None if None in made.values() else Columns(first.kind, made)
        if isinstance(first.data, list):
            return Columns(first.kind, [item for part in parts for item in part.data])
        joined = torch.cat if isinstance(first.data, torch.Tensor) else np.concatenate
        return Columns(first.kind, joined([part.data for part in parts]))

    def leaves(self) -> Iterator[Any]:
        """Its arrays, tensors and lists."""
        if isinstance(self.data, dict):
            for column in self.data.values():
                yield from column.leaves()
        else:
            yield self.data

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """The buffers under it; those of bytes count together. An array counts as the tensor that is made of it."""
        found: list[tuple[int, int]] = []
        for leaf in self.leaves():
            if not isinstance(leaf, np.ndarray):
                found += buffers(leaf)
            elif leaf.nbytes:
                found.append((leaf.__array_interface__["data"][0], leaf.nbytes))
        return tuple(found)

    def rows(self) -> list[Any]:
        """The samples again."""
        data = self.data
        if self.items is not None:
            return list(self.items)
        if isinstance(data, dict):
            rows = list(zip(*[column.rows() for column in data.values()], strict=True))
            return rows if self.kind is tuple else [dict(zip(data, row, strict=True)) for row in rows]
        if self.kind is np.ndarray:
            return [data[index, ...] for index in range(len(data))]
        if self.kind is torch.Tensor:
            return list(data.unbind())
        return data.tolist() if self.kind in SCALARS else list(data)


def fit(parts: Sequence[Columns]) -> bool:
    """Whether parts can be laid end to end."""
    kind, first = parts[0].kind, parts[0].data
    if kind is None or any(part.kind is not kind for part in parts):
        return False
    if isinstance(first, dict):
        return all(part.data.keys() == first.keys() for part in parts)
    if isinstance(first, list):
        return True
    return all(part.data.dtype == first.dtype and part.data.shape[1:] == first.shape[1:] for part in parts)


class _NoColumns(Exception):
    """Samples that cannot be taken apart and put together again."""


def pack(items: Sequence[Any]) -> Columns | None:
    """Samples as columns alone; None where they are not all of one kind, have no columns, or are lists, of which a
    ``Batch`` that pads makes something else."""
    if isinstance(items[0], list):
        return None
    try:
        return columns_of(items, alone=True)
    except _NoColumns:
        return None


def columns_of(
    items: Sequence[Any], kept: Callable[[str], bool] | None = None, field: str = "", alone: bool = False
) -> Columns:
    """Samples as columns; fields in which they are not alike, and those that have no columns or are ``kept``, stay
    values.

    ``alone``: without the samples; raises ``_NoColumns`` where anything would have to be kept.
    """
    first = items[0]
    kind: Any = type(first)
    data: Any = None
    if kept is None or not kept(field):
        if kind is torch.Tensor:
            data = _stacked(items)
            if alone and data is not None and data.layout is not torch.strided:  # no part of it is a view
                data = None
        elif kind in SCALARS or kind in ARRAYS:
            data = _array(items)
            kind = np.ndarray if kind in ARRAYS else kind
        elif kind in _TEXTS:
            data = list(items) if len(set(map(type, items))) == 1 else None
        else:
            values = _values(items, alone, not field)
            if values is not None:
                data = {
                    name: columns_of(column, kept, joined_name(field, name), alone)
                    for name, column in values.items()
                }
    if not alone:
        return Columns(None if data is None else kind, data, items)
    if data is None:
        raise _NoColumns
    return Columns(kind, data)


def joined_name(field: str, name: Any) -> str:
    """The name of a field within a field."""
    return f"{field}.{name}" if field else str(name)


def _values(items: Sequence[Any], plain: bool, top: bool) -> dict[Any, Sequence[Any]] | None:
    """The values of each field of containers that have the same fields; None of anything else. A sample that is a list
    has its entries as fields, a list within a sample is a value.
    """
    first = items[0]
    kind = type(first)
    one_type = len(set(map(type, items))) == 1
    if (kind is dict and one_type) or (not plain and isinstance(first, Mapping)):
        keys = first.keys()
        if not (one_type or all(isinstance(item, Mapping) for item in items)):
            return None
        if any(item.keys() != keys for item in items) or (plain and not keys):
            return None
        return {name: [item[name] for item in items] for name in first}
    if kind is tuple or (top and kind is list) or (not plain and is_a_tuple(first)):
        if not (one_type or all(map(is_a_tuple, items))) or (plain and not (first and one_type)):
            return None
        same = len(set(map(len, items))) == 1
        return dict(enumerate(zip(*items, strict=True))) if same else None
    if plain or not one_type or not (is_namedtuple(first) or is_dataclass_value(first)):
        return None
    names = first._fields if is_namedtuple(first) else [each.name for each in fields(first)]
    return {name: [getattr(item, name) for item in items] for name in names}


def is_a_tuple(item: Any) -> bool:
    """Whether it is a tuple without names."""
    return isinstance(item, tuple) and not is_namedtuple(item)


def _stacked(items: Sequence[Any]) -> torch.Tensor | None:
    """Tensors that are all alike, in one call and no object per sample; None where they are not."""
    try:
        # Of quantised ones a view can end the program, and torch changes those of several scales to the first's.
        if items[0].is_quantized or len(set(map(dtype_of, items))) > 1:
            return None
        stacked = torch.stack(items if isinstance(items, list) else list(items))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return stacked if stacked.__class__ is torch.Tensor else None


def _array(items: Sequence[Any]) -> np.ndarray | None:
    """As :func:`_stacked`, of arrays or numbers, as an array of its own memory (samples, ...)."""
    kinds = set(map(type, items))
    kind = kinds.pop()
    if kinds:
        return None
    try:
        if kind in SCALARS:
            return np.fromiter(items, SCALARS[kind], len(items))
        shapes, dtypes = set(map(_shape, items)), set(map(dtype_of, items))
        if len(shapes) > 1 or len(dtypes) > 1 or dtypes.pop() not in AS_IN_TORCH:
            return None
        shape = shapes.pop()
        return np.concatenate(items).reshape(len(items), *shape) if shape else np.array(items)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


Decode = Callable[[bytes, str, int], Any]
"""A module's function: the bytes of a sample, the name of their file and their offset in it, to the sample."""


class EncodedRows:
    """Several samples; what ``Columns`` is to samples of columns.

    Attributes:
        data: the bytes of each.
        places: the file of each, and its offset there.
    """

    __slots__ = ("_decode", "_owner", "data", "places")
    kind = None

    def __init__(
        self, decode: Decode, data: list[bytes], places: list[tuple[str, int]], owner: Any = None
    ) -> None:
        self._decode, self.data, self.places = decode, data, places
        self._owner = (sum(map(len, data)),) if owner is None else owner  # of all samples that came together

    def __len__(self) -> int:
        return len(self.data)

    def part(self, start: int, stop: int) -> EncodedRows:
        """Samples ``start`` to ``stop``."""
        return EncodedRows(self._decode, self.data[start:stop], self.places[start:stop], self._owner)

    def take(self, indices: Any) -> EncodedRows:
        """The samples with these int64 indices, in their order."""
        chosen = indices.tolist()
        return EncodedRows(self._decode, [self.data[i] for i in chosen], [self.places[i] for i in chosen])

    @staticmethod
    def joined(parts: Sequence[EncodedRows]) -> EncodedRows | None:
        """Several laid end to end; None where they are not of one format."""
        first = parts[0]
        if any(part._decode is not first._decode for part in parts):
            return None
        data = [each for part in parts for each in part.data]
        return EncodedRows(first._decode, data, [each for part in parts for each in part.places])

    def rows(self) -> list[Any]:
        """The samples; the first that is broken is raised."""
        decode = self._decode
        return [decode(data, *place) for data, place in zip(self.data, self.places, strict=True)]

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """Their bytes, which count together."""
        return ((id(self._owner), *self._owner),)

    def __reduce__(self) -> Any:
        lengths = array("Q", map(len, self.data))
        return _received, (self._decode, PickleBuffer(b"".join(self.data)), lengths, self.places)


def _received(decode: Decode, raw: Any, lengths: Sequence[int], places: list[tuple[str, int]]) -> EncodedRows:
    """The rows, whose bytes came end to end."""
    ends, whole = [0], bytes(raw)
    for nbytes in lengths:
        ends.append(ends[-1] + nbytes)
    return EncodedRows(decode, [whole[start:stop] for start, stop in pairwise(ends)], places)
