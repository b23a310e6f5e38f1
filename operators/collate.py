"""Makes a batch of a list of samples. Pure.

What a field becomes follows from the types of its values in the samples, never from the values themselves:

* numbers, arrays and tensors: one tensor, of the dtype to which torch promotes theirs (int is int64, float float64),
  and of one shape, or padded;
* lists, which may be of any length: a list with the list of each sample, whatever they hold; a padded tensor where
  ``pad`` is given;
* dicts, tuples, named tuples and dataclasses, which have the same fields in every sample: the same of columns;
* text, bytes and other objects: a list;
* a field for which ``Batch(collate=...)`` names a function: what that makes of the list of its values;
* None, and two of these kinds in one field: an error that says so.

``torch.utils.data.default_collate`` makes lists, which must then be of equal length, a list of columns; it takes no
other objects, and the dtype of the first sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pipegraph.errors import DataError
from pipegraph.operators.padding import Pad
from pipegraph.tree import is_dataclass_value, is_namedtuple, rebuilt, with_fields

SCALARS: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}
ARRAYS = frozenset({np.ndarray, np.memmap})
_NUMERIC = "biufc"
_AS_IN_TORCH = frozenset(map(np.dtype, "?bBhHiIlLqQefdFD"))
"""Not those of another byte order, nor the long ones."""
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def collate(items: Sequence[Any], pad: Any = None, field: str = "") -> Any:
    """The batch of some samples; see the module docstring.

    Args:
        items: samples of one shape of tree, at least one.
        pad: what fills arrays and lists of numbers up to the largest of the batch, a value or a ``Pad``; None makes
            arrays of several shapes an error and leaves lists as they are. A mapping gives one per field name, or a
            function that makes the field of the list of its values.
        field: where in the sample this is, for messages.

    Raises:
        DataError: arrays of different shapes without ``pad``, or samples of different kinds or fields; ``pad`` names
            a field that they do not have.
    """
    if not field and isinstance(pad, Mapping):
        _check_names(items[0], pad)
    filling = _pad_of(pad, field)
    if isinstance(filling, Pad):
        if _is_ragged(items[0]):
            if not field:
                _check_place(items[0], pad, field)
            return _sized(items, filling, field)
        filling = filling.value
    if callable(filling):
        return filling(list(items))
    alike = stacked_at_once(items)
    if alike is not None:
        return alike
    kind = _kind_of_all(items, field)
    if kind == "number":
        return _stack(_tensors(items, field), filling, field)
    if kind == "mapping":
        return _collate_mapping(items, items[0], pad, field)
    if kind == "tuple":
        return _collate_tuples(items, pad, field)
    if kind == "list":
        return list(items) if filling is None else _padded_lists(items, filling, field)
    if isinstance(kind, type):
        return _collate_records(items, items[0], pad, field)
    return list(items)


def _kind_of_all(items: Sequence[Any], field: str) -> Any:
    """The kind that all samples have.

    Raises:
        DataError: they have several, or are None.
    """
    kind = _kind_of(items[0])
    if kind is None and all(item is None for item in items):
        raise DataError(
            f"{_where(field)}: None in all samples: a batch has no place for None; fill or drop it with a Map "
            "before Batch, or use Batch(..., collate=list)"
            + ("" if field else " (does the function before it end without a return?)")
        )
    arrays = kind == "number" or isinstance(items[0], np.ndarray)  # whose kind is more than their type
    seen = {type(items[0])}
    for number, item in enumerate(items):
        if (arrays or type(item) not in seen) and _kind_of(item) != kind:
            raise DataError(
                f"{_where(field)}: {_named(items[0])} in sample 0 and {_named(item)} in sample {number} do not make "
                "one batch; make all samples alike with a Map before Batch, or use Batch(..., collate=list)"
            )
        seen.add(type(item))
    return kind


def _kind_of(item: Any) -> Any:
    if isinstance(item, bool | int | float | complex | torch.Tensor):
        return "number"
    if isinstance(item, str | bytes | bytearray | memoryview):
        return "text"
    if isinstance(item, np.ndarray | np.generic):
        masked = isinstance(item, np.ma.MaskedArray)  # a tensor would show what its mask hides
        return "number" if item.dtype.kind in _NUMERIC and not masked else "other array"
    if item is None:
        return None
    if isinstance(item, Mapping):
        return "mapping"
    if is_namedtuple(item) or is_dataclass_value(item):
        return type(item)
    if isinstance(item, tuple):
        return "tuple"
    return "list" if isinstance(item, list) else "other"


def _where(field: str) -> str:
    return f"field {field!r}" if field else "the samples"


def _named(item: Any) -> str:
    dtype = f" of {item.dtype}" if isinstance(item, np.ndarray | torch.Tensor) else ""
    return f"{type(item).__name__}{dtype}"


def _join(field: str, name: Any) -> str:
    return f"{field}.{name}" if field else str(name)


class ByField(dict[Any, Any]):
    """What fills each field, or makes it; all others are filled with ``otherwise``."""

    def __init__(self, named: Mapping[Any, Any], otherwise: Any = None) -> None:
        super().__init__(named)
        self._otherwise = otherwise

    def get(self, name: Any, default: Any = None) -> Any:
        return super().get(name, self._otherwise)


def _pad_of(pad: Any, field: str) -> Any:
    return pad.get(field) if isinstance(pad, Mapping) else pad


def _check_names(item: Any, pad: Mapping[Any, Any]) -> None:
    """Raises DataError where a padding is for a field that the samples do not have."""
    there = set(_names(item))
    unknown = next((name for name in pad if name not in there), None)
    if unknown is not None:
        option = "collate" if callable(pad[unknown]) else "pad"
        raise DataError(
            f"Batch: {option} names the field {unknown!r}, which the samples do not have; they have "
            f"{', '.join(map(repr, sorted(there - {''}))) or 'none'}"
        )


def _names(item: Any, field: str = "") -> Iterator[str]:
    """Of a sample ("") and its fields, at any depth, as :func:`_join` writes them."""
    yield field
    kind = _kind_of(item)
    inside: Iterable[tuple[Any, Any]] = item.items() if kind == "mapping" else ()
    if kind == "tuple":
        inside = enumerate(item)
    elif isinstance(kind, type):
        inside = [(name, getattr(item, name)) for name in _fields_of(item)]
    for name, value in inside:
        yield from _names(value, _join(field, name))


def _fields_of(record: Any) -> Sequence[str]:
    return record._fields if is_namedtuple(record) else [f.name for f in dataclasses.fields(record)]


def _sized(items: Sequence[Any], filling: Pad, field: str) -> torch.Tensor:
    """As :func:`collate`, the first dimension of the size that ``filling`` says."""
    made: torch.Tensor = collate(items, {field: filling.value}, field)
    longest = made.shape[1]
    size = filling.size(longest, field)
    if size == longest:
        return made
    grown = _full(made, (len(items), size, *made.shape[2:]), filling.value, field)
    grown[:, :longest] = made
    return grown


def _is_ragged(item: Any) -> bool:
    """Whether a sample's value may be of another length than its neighbour's."""
    return isinstance(item, list) or (isinstance(item, np.ndarray | torch.Tensor) and item.ndim > 0)


def only_fills(pad: Any) -> bool:
    """Whether equal sizes stay as they are, and no field is added."""
    found = pad.values() if isinstance(pad, Mapping) else [pad]
    return all(each.plain for each in found if isinstance(each, Pad))


def _check_place(item: Any, pad: Any, field: str) -> None:
    """Raises DataError where mask and lengths have no dict to go to."""
    filling = _pad_of(pad, field)
    if isinstance(filling, Pad) and (filling.mask or filling.lengths) and _is_ragged(item):
        raise DataError(
            f"{_where(field)}: Pad(mask=..., lengths=...) adds fields, and here there is no dict to add them to; make "
            "the samples dicts with a Map before Batch"
        )


# -- containers with the same fields in every sample -------------------------------------------------


def _collate_mapping(items: Sequence[Any], first: Mapping[Any, Any], pad: Any, field: str) -> Any:
    for number, item in enumerate(items):
        if item.keys() != first.keys():
            odd = sorted(map(str, item.keys() ^ first.keys()))
            raise DataError(
                f"samples of one batch must have the same fields: sample {number} and sample 0 differ in "
                f"{', '.join(odd)}; give all samples the same fields with a Map before Batch"
            )
    made = {key: collate([item[key] for item in items], pad, _join(field, key)) for key in first}
    beside = _beside(items, made, pad, field)
    if beside:
        return {**made, **beside}
    alike = all(type(item) is type(first) for item in items)
    return rebuilt(first, list(made.values())) if alike else made


def _beside(items: Sequence[Any], made: Mapping[Any, Any], pad: Any, field: str) -> dict[Any, Any]:
    """Masks and lengths of the fields of a batch."""
    found: dict[Any, Any] = {}
    for key, value in made.items():
        filling = _pad_of(pad, _join(field, key))
        if not isinstance(filling, Pad) or not _is_ragged(items[0][key]):
            continue
        lengths = [len(item[key]) for item in items]
        for name, tensor in filling.fields(str(key), lengths, value.shape[1]).items():
            if name in made or name in found:
                raise DataError(
                    f"{_where(_join(field, name))}: there is such a field already; give Pad(mask=..., lengths=...) "
                    f"of {key!r} other names"
                )
            found[name] = tensor
    return found


def _collate_tuples(items: Sequence[tuple[Any, ...]], pad: Any, field: str) -> tuple[Any, ...]:
    odd = next((item for item in items if len(item) != len(items[0])), None)
    if odd is not None:
        raise DataError(
            f"{_where(field)}: tuples of {len(items[0])} and {len(odd)} entries do not make one batch: what varies in "
            "length must be a list; or use Batch(..., collate=list)"
        )
    for place, value in enumerate(items[0]):
        _check_place(value, pad, _join(field, place))
    return tuple([collate(c, pad, _join(field, i)) for i, c in enumerate(zip(*items, strict=True))])


def _collate_records(items: Sequence[Any], first: Any, pad: Any, field: str) -> Any:
    names = _fields_of(first)
    for name in names:
        _check_place(getattr(first, name), pad, _join(field, name))
    made = {n: collate([getattr(item, n) for item in items], pad, _join(field, n)) for n in names}
    return type(first)(*made.values()) if is_namedtuple(first) else with_fields(first, made)


# -- numbers -----------------------------------------------------------------------------------------


def stacked_at_once(items: Sequence[Any]) -> torch.Tensor | None:
    """Samples that are all alike, in one call each and no object per sample; None where they are not.

    What that call does not take, the long way finds out, and says where.
    """
    if items[0].__class__ is torch.Tensor:
        return stacked_tensors(items)
    array = array_of_all(items)
    try:
        return None if array is None else torch.from_numpy(array)
    except TypeError:  # unsigned long long, which NumPy holds for equal to unsigned long
        return None


def stacked_tensors(items: Sequence[Any]) -> torch.Tensor | None:
    """As :func:`stacked_at_once`, of tensors."""
    try:
        if len(set(map(_dtype, items))) > 1:
            return None
        stacked = torch.stack(items if isinstance(items, list) else list(items))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return stacked if stacked.__class__ is torch.Tensor else None


def array_of_all(items: Sequence[Any]) -> np.ndarray | None:
    """As :func:`stacked_at_once`, of arrays or numbers, as an array of its own memory (samples, ...)."""
    kinds = set(map(type, items))
    kind = kinds.pop()
    if kinds:
        return None
    try:
        if kind in ARRAYS:
            shapes, dtypes = set(map(_shape, items)), set(map(_dtype, items))
            if len(shapes) > 1 or len(dtypes) > 1 or dtypes.pop() not in _AS_IN_TORCH:
                return None
            shape = shapes.pop()
            return np.concatenate(items).reshape(len(items), *shape) if shape else np.array(items)
        if kind in SCALARS:
            return np.fromiter(items, SCALARS[kind], len(items))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    return None


def _tensors(items: Sequence[Any], field: str) -> list[torch.Tensor]:
    made = []
    for item in items:
        try:
            made.append(_tensor(item))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # an int of over 64 bits too
            raise DataError(
                f"{_where(field)}: {_named(item)} cannot be made a tensor ({error}); change it with a Map before "
                "Batch, or use Batch(..., collate=list)"
            ) from error
    return made


def _tensor(item: Any) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return item
    if not isinstance(item, np.ndarray | np.generic):
        item = np.asarray(item, next((SCALARS[k] for k in SCALARS if isinstance(item, k)), np.complex128))
    # torch takes neither foreign byte order nor negative strides, and warns of memory that is read-only.
    array = np.ascontiguousarray(item, dtype=item.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy()).reshape(item.shape)


def _promoted(tensors: list[torch.Tensor], field: str) -> list[torch.Tensor]:
    """The tensors in the one dtype that holds them all, as torch promotes."""
    dtypes = set(map(_dtype, tensors))
    if len(dtypes) == 1:
        return tensors
    try:
        dtype = reduce(torch.promote_types, dtypes)
    except RuntimeError as error:
        found = ", ".join(sorted(map(str, dtypes)))
        raise DataError(
            f"{_where(field)}: {found} do not make one batch; give all samples one dtype"
        ) from error
    return [tensor.to(dtype) for tensor in tensors]


def _stack(tensors: list[torch.Tensor], pad: Any, field: str) -> torch.Tensor:
    tensors = _promoted(tensors, field)
    if tensors[0].is_nested:
        raise DataError(
            f"{_where(field)}: nested tensors cannot be stacked; pad them with torch.nested.to_padded_tensor before "
            "Batch, or use Batch(..., collate=list)"
        )
    shape = tensors[0].shape
    if all(tensor.shape == shape for tensor in tensors):
        try:
            return torch.stack(tensors)
        except RuntimeError as error:  # of sparse layouts other than COO, and of several layouts
            layouts = " and ".join(sorted({str(tensor.layout) for tensor in tensors}))
            raise DataError(
                f"{_where(field)}: tensors of layout {layouts} cannot be stacked; make all of them dense (to_dense) "
                "or COO (to_sparse) before Batch, or use Batch(..., collate=list)"
            ) from error
    if pad is None or any(tensor.dim() != len(shape) for tensor in tensors):
        odd = next(tensor.shape for tensor in tensors if tensor.shape != shape)
        raise DataError(
            f"{_where(field)}: arrays of shapes {tuple(shape)} and {tuple(odd)} cannot be stacked; "
            "make them equal before Batch, or use Batch(..., pad=0), or keep them as a list: "
            + (f"Batch(..., collate={{{field!r}: list}})" if field else "Batch(..., collate=list)")
        )
    largest = [max(tensor.shape[i] for tensor in tensors) for i in range(len(shape))]
    stacked = _full(tensors[0], (len(tensors), *largest), pad, field)
    for row, tensor in zip(stacked, tensors, strict=True):
        row[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return stacked


def _full(like: torch.Tensor, shape: Sequence[int], pad: Any, field: str) -> torch.Tensor:
    """A tensor of padding, of the dtype of ``like``, which must hold it."""
    try:
        made = like.new_full(shape, pad)
        exact = made.is_floating_point() or made.is_complex() or not made.numel()
        fits = exact or made.flatten()[0].item() == pad
    except (RuntimeError, TypeError):  # torch says so of some that do not fit
        fits = False
    if not fits:
        raise DataError(
            f"{_where(field)}: pad={pad!r} does not fit {str(like.dtype).removeprefix('torch.')}, the dtype of the "
            "values; give the field another: Batch(..., pad={'field': value})"
        )
    return made


# -- lists of numbers --------------------------------------------------------------------------------


def _padded_lists(items: Sequence[list[Any]], pad: Any, field: str) -> torch.Tensor:
    """Lists of numbers, of lists of them and so on, as one padded tensor; what is empty counts as ``pad`` does."""
    flat = list(chain.from_iterable(items))
    kinds = {*map(type, flat), type(pad)}
    if not kinds <= SCALARS.keys():
        return _filled([_nested(item, pad, field) for item in items], pad, field)
    dtype = np.result_type(*(SCALARS[kind] for kind in kinds))
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    padded = np.full((len(items), int(lengths.max())), pad, dtype)
    try:
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.asarray(flat, dtype)
    except OverflowError as error:
        raise DataError(f"{_where(field)}: an int of more than 64 bits cannot be made a tensor") from error
    return torch.from_numpy(padded)


def _nested(value: Any, pad: Any, field: str) -> torch.Tensor:
    if isinstance(value, list | tuple):
        return _filled([_nested(each, pad, field) for each in value], pad, field)
    if _kind_of(value) != "number":
        raise DataError(
            f"{_where(field)}: pad={pad!r} fills lists of numbers, this one holds {_named(value)}; name the fields to "
            "fill: Batch(..., pad={'field': 0})"
        )
    return _tensors([value], field)[0]


def _filled(tensors: list[torch.Tensor], pad: Any, field: str) -> torch.Tensor:
    empty = _tensor(pad).reshape(-1)[:0]
    if not tensors:
        return empty
    dims = max(tensor.dim() for tensor in tensors)
    shaped = [t.reshape((0,) * dims) if t.shape == (0,) and dims else t for t in tensors]
    dtype = _promoted([*shaped, empty], field)[-1].dtype
    return _stack([tensor.to(dtype) for tensor in shaped], pad, field)
