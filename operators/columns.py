"""Rows kept together as columns until they are a batch: each field of several samples in one array.

The stage that makes rows packs them at once, in the thread that made them: then one array travels instead of a
thousand small objects, and is counted as one buffer. A batch is what such parts make laid end to end, exactly as
if all its rows had been collated one by one; rows that do not fit together are taken apart again for ``collate``
to judge. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from pipegraph.operators.collate import ARRAYS, SCALARS, array_of_all, collate, stacked_tensors
from pipegraph.tree import buffers

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch copies these several times faster as their signed twins."""


class Columns:
    """Several samples of one kind.

    Attributes:
        kind: the type of each sample.
        data: for tensors a tensor (samples, ...); for arrays and numbers an array: to cut and to free a tensor gives
            up the interpreter lock, and with it the turn. For bytes and str a list, for dicts and tuples a dict or
            tuple of columns.
    """

    __slots__ = ("data", "kind")

    def __init__(self, kind: type, data: Any) -> None:
        self.kind = kind
        self.data = data

    @property
    def parts(self) -> list[Columns]:
        """What it is of, as of ``PackedParts``."""
        return [self]

    def part(self, start: int, stop: int) -> Columns:
        """Samples ``start`` to ``stop``, in the same memory."""
        if self.kind is dict:
            return Columns(dict, {name: column.part(start, stop) for name, column in self.data.items()})
        if self.kind is tuple:
            return Columns(tuple, tuple([column.part(start, stop) for column in self.data]))
        return Columns(self.kind, self.data[start:stop])

    def tree(self) -> Any:
        """The same as a tree of arrays, tensors and lists."""
        if self.kind is dict:
            return {name: column.tree() for name, column in self.data.items()}
        return tuple([column.tree() for column in self.data]) if self.kind is tuple else self.data

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """The buffers under it; those of bytes count together. An array counts as the tensor that is made of it."""
        if isinstance(self.data, np.ndarray):
            return ((self.data.__array_interface__["data"][0], self.data.nbytes),) if self.data.nbytes else ()
        if self.kind is dict:
            return tuple(chain.from_iterable([column.buffers() for column in self.data.values()]))
        if self.kind is tuple:
            return tuple(chain.from_iterable([column.buffers() for column in self.data]))
        return buffers(self.data)

    def rows(self) -> list[Any]:
        """The samples again."""
        if self.kind is dict:
            columns = zip(*(column.rows() for column in self.data.values()), strict=True)
            return [dict(zip(self.data, values, strict=True)) for values in columns]
        if self.kind is tuple:
            return list(zip(*(column.rows() for column in self.data), strict=True))
        if self.kind is np.ndarray:
            return [self.data[index, ...] for index in range(len(self.data))]
        if self.kind is torch.Tensor:
            return list(self.data.unbind())
        return self.data.tolist() if self.kind in SCALARS else list(self.data)


def pack(items: Sequence[Any]) -> Columns | None:
    """Samples as columns; None where they are not all of one kind, or have no columns."""
    kind = type(items[0])
    if kind is torch.Tensor:
        stacked = stacked_tensors(items)
        if stacked is None or stacked.layout is not torch.strided:  # no part of it is a view
            return None
        return Columns(kind, stacked)
    if kind in ARRAYS or kind in SCALARS:
        array = array_of_all(items)
        return None if array is None else Columns(np.ndarray if kind in ARRAYS else kind, array)
    if kind is not dict and kind is not tuple and kind is not bytes and kind is not str:
        return None
    if len(set(map(type, items))) > 1:
        return None
    if kind is bytes or kind is str:
        return Columns(kind, list(items))
    first = items[0]
    if kind is tuple:
        if not first or any(len(item) != len(first) for item in items):
            return None
        found = [pack(column) for column in zip(*items, strict=True)]
        return None if None in found else Columns(tuple, tuple(found))
    if not first or any(item.keys() != first.keys() for item in items):
        return None
    fields: dict[Any, Columns] = {}
    for name in first:
        column = pack([item[name] for item in items])
        if column is None:
            return None
        fields[name] = column
    return Columns(dict, fields)


class _NotAlikeError(Exception):
    """Parts that do not fit together."""


def batch_of(parts: Sequence[Columns], pad: Any) -> Any:
    """What ``collate`` makes of the samples of all parts.

    Raises:
        DataError: as ``collate`` does.
    """
    try:
        return _end_to_end(parts)
    except _NotAlikeError:
        return collate([row for part in parts for row in part.rows()], pad)


def _end_to_end(parts: Sequence[Columns]) -> Any:
    kind, first = parts[0].kind, parts[0].data
    if any(part.kind is not kind for part in parts):
        raise _NotAlikeError
    if kind is dict:
        if any(part.data.keys() != first.keys() for part in parts):
            raise _NotAlikeError
        return {name: _end_to_end([part.data[name] for part in parts]) for name in first}
    if kind is tuple:
        if any(len(part.data) != len(first) for part in parts):
            raise _NotAlikeError
        return tuple([_end_to_end(columns) for columns in zip(*(part.data for part in parts), strict=True)])
    if not isinstance(first, torch.Tensor | np.ndarray):
        return [item for part in parts for item in part.data]
    if any(part.data.dtype != first.dtype or part.data.shape[1:] != first.shape[1:] for part in parts):
        raise _NotAlikeError
    # A part of a larger array would keep the rest of it for as long as the batch lives.
    if isinstance(first, np.ndarray):
        whole = len(parts) == 1 and _has_its_own_memory(first)
        try:
            return torch.from_numpy(first if whole else np.concatenate([part.data for part in parts]))
        except TypeError as error:
            raise _NotAlikeError from error
    if len(parts) == 1 and first.nbytes == first.untyped_storage().nbytes():
        return first
    dtype = first.dtype
    signed = _SIGNED.get(dtype, dtype)
    return torch.cat([part.data.view(signed) for part in parts]).view(dtype)


def _has_its_own_memory(array: np.ndarray) -> bool:
    """Whether nothing but the array lies in the memory that it keeps; torch wants to write it, too."""
    base = array.base
    return array.flags.writeable and (base is None or memoryview(base).nbytes == array.nbytes)  # type: ignore[arg-type]
