"""From a list of samples to a batch, and back. Pure."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pipegraph.errors import DataError
from pipegraph.tree import is_dataclass_value, is_namedtuple, with_fields

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
"""What ``torch.tensor`` takes; other numbers (fractions, decimals) become lists."""

SCALARS: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}
ARRAYS = frozenset({np.ndarray, np.memmap})
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def collate(items: Sequence[Any], pad: Any = None, field: str = "") -> Any:
    """Stack samples as ``torch.utils.data.default_collate`` does; bytes, str and the rest become lists.

    Args:
        items: samples of one shape of tree, at least one.
        pad: what fills ragged arrays up to the largest of the batch; None makes ragged an error.
            A mapping gives a value per field name.
        field: where in the sample this is, for messages.

    Raises:
        DataError: arrays of different shapes without ``pad``, or samples with different fields.
    """
    alike = stacked_at_once(items)
    if alike is not None:
        return alike
    first = items[0]
    if isinstance(first, torch.Tensor):
        return _stack(_tensors(items, field), _pad_of(pad, field), field)
    if isinstance(first, np.ndarray):
        if first.dtype.kind in "OSUVM":
            return list(items)
        return _stack(_tensors(items, field), _pad_of(pad, field), field)
    if isinstance(first, np.generic) and first.dtype.kind in "biufc":
        values = np.asarray(items)
        if values.dtype.kind not in "biufc":
            raise _not_alike(items, field)
        return torch.as_tensor(values)
    if isinstance(first, float) and all(isinstance(item, numbers.Real) for item in items):
        return torch.tensor(items, dtype=torch.float64)
    if isinstance(first, _NUMBERS) and all(isinstance(item, _NUMBERS) for item in items):
        try:
            return torch.tensor(items)
        except (ValueError, RuntimeError, OverflowError) as error:  # an int of more than 64 bits
            raise _not_alike(items, field) from error
    if isinstance(first, str | bytes | bytearray | memoryview):
        return list(items)
    if isinstance(first, Mapping):
        return _collate_mapping(items, first, pad, field)
    if is_namedtuple(first):
        if any(type(item) is not type(first) for item in items):
            raise _not_alike(items, field)
        return type(first)(
            *(
                collate(column, pad, _join(field, name))
                for column, name in zip(zip(*items, strict=True), first._fields, strict=True)
            )
        )
    if is_dataclass_value(first):
        if any(type(item) is not type(first) for item in items):
            raise _not_alike(items, field)
        names = [f.name for f in dataclasses.fields(first)]
        columns = {n: collate([getattr(item, n) for item in items], pad, _join(field, n)) for n in names}
        return with_fields(first, columns)
    if isinstance(first, list | tuple):
        if not all(isinstance(item, list | tuple) for item in items):
            raise _not_alike(items, field)
        if any(len(item) != len(first) for item in items):
            return list(items)
        made = [collate(c, pad, _join(field, str(i))) for i, c in enumerate(zip(*items, strict=True))]
        return tuple(made) if isinstance(first, tuple) else made
    return list(items)


def stacked_at_once(items: Sequence[Any]) -> torch.Tensor | None:
    """Samples that are all alike, in one call each and no object per sample; None where they are not.

    What that call does not take, the long way finds out, and says where.
    """
    kinds = set(map(type, items))
    kind = kinds.pop()
    if kinds:
        return None
    try:
        if kind is torch.Tensor:
            return torch.stack(list(items)) if len(set(map(_dtype, items))) == 1 else None
        if kind in ARRAYS:
            shapes, dtypes = set(map(_shape, items)), set(map(_dtype, items))
            if len(shapes) > 1 or len(dtypes) > 1 or dtypes.pop().kind not in "biufc":
                return None
            shape = shapes.pop()
            rows = np.concatenate(items).reshape(len(items), *shape) if shape else np.array(items)
            return torch.from_numpy(np.asarray(rows))
        if kind in SCALARS:
            return torch.from_numpy(np.fromiter(items, SCALARS[kind], len(items)))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    return None


def _tensors(items: Sequence[Any], field: str) -> list[torch.Tensor]:
    try:
        return [_tensor(item) for item in items]
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_alike(items, field) from error


def _tensor(item: Any) -> torch.Tensor:
    if not isinstance(item, np.ndarray):
        return torch.as_tensor(item)
    # torch takes neither foreign byte order nor negative strides, and warns of memory that is read-only.
    array = np.ascontiguousarray(item, dtype=item.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy()).reshape(item.shape)


def _not_alike(items: Sequence[Any], field: str) -> DataError:
    where = f"field {field!r}" if field else "the samples"
    number, odd = next(
        ((i, item) for i, item in enumerate(items) if type(item) is not type(items[0])), (0, items[0])
    )
    if number:
        what = f"{_kind(items[0])} in sample 0 and {_kind(odd)} in sample {number} do not make one batch"
    else:
        what = f"{_kind(odd)} cannot be made a tensor"
    return DataError(
        f"{where}: {what}; make all samples alike with a Map before Batch, or use Batch(..., collate=list)"
    )


def _kind(item: Any) -> str:
    dtype = f" of {item.dtype}" if isinstance(item, np.ndarray | torch.Tensor) else ""
    return f"{type(item).__name__}{dtype}"


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _pad_of(pad: Any, field: str) -> Any:
    return pad.get(field) if isinstance(pad, Mapping) else pad


def _collate_mapping(items: Sequence[Any], first: Mapping[Any, Any], pad: Any, field: str) -> dict[Any, Any]:
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise _not_alike(items, field)
        if item.keys() != first.keys():
            odd = sorted(map(str, item.keys() ^ first.keys()))
            raise DataError(
                f"samples of one batch must have the same fields: sample {number} and sample 0 differ in "
                f"{', '.join(odd)}; give all samples the same fields with a Map before Batch"
            )
    return {key: collate([item[key] for item in items], pad, _join(field, str(key))) for key in first}


def _stack(tensors: list[torch.Tensor], pad: Any, field: str) -> torch.Tensor:
    shape = tensors[0].shape
    if all(tensor.shape == shape for tensor in tensors):
        return torch.stack(tensors)
    where = f"field {field!r}" if field else "the samples"
    if pad is None or any(tensor.dim() != len(shape) for tensor in tensors):
        odd = next(tensor.shape for tensor in tensors if tensor.shape != shape)
        raise DataError(
            f"{where}: arrays of shapes {tuple(shape)} and {tuple(odd)} cannot be stacked; "
            "make them equal before Batch, or use Batch(..., pad=0), or Batch(..., collate=list)"
        )
    largest = [max(tensor.shape[i] for tensor in tensors) for i in range(len(shape))]
    stacked = tensors[0].new_full((len(tensors), *largest), pad)
    for row, tensor in zip(stacked, tensors, strict=True):
        row[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return stacked


def rows_of(batch: Any, index: int, count: int) -> Any:
    """Sample ``index`` of a batch of ``count``: the same tree without the sample dimension.

    Fields without that dimension go to every sample as they are.
    """
    if isinstance(batch, torch.Tensor):
        return batch[index] if batch.dim() and len(batch) == count else batch
    if isinstance(batch, np.ndarray):
        return batch[index] if batch.ndim and len(batch) == count else batch
    if isinstance(batch, Mapping):
        return {key: rows_of(value, index, count) for key, value in batch.items()}
    if is_namedtuple(batch):
        return type(batch)(*(rows_of(value, index, count) for value in batch))
    if is_dataclass_value(batch):
        values = {f.name: rows_of(getattr(batch, f.name), index, count) for f in dataclasses.fields(batch)}
        return with_fields(batch, values)
    if isinstance(batch, tuple):
        return tuple(rows_of(value, index, count) for value in batch)
    if isinstance(batch, list):
        if len(batch) == count and not any(_stacked(value, count) for value in batch):
            return batch[index]
        return [rows_of(value, index, count) for value in batch]
    return batch


def _stacked(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor | list) and len(value) == count if not _scalar(value) else False


def _scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0
