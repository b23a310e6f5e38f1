"""Makes a batch of a list of samples. Pure.

What a field becomes follows from the types of its values in the samples, never from the values themselves:

* numbers, arrays and tensors: one tensor, of the dtype to which torch promotes theirs (int is int64, float float64),
  and of one shape, or padded;
* lists within a sample, which may be of any length: a list with the list of each sample, whatever they hold; a padded
  tensor where ``pad`` is given;
* samples that are lists (without a ``pad`` for them): as tuples of the same entries;
* dicts, tuples, named tuples and dataclasses, which have the same fields in every sample: the same of columns;
* text, bytes and other objects: a list;
* a field for which ``Batch(collate=...)`` names a function: what that makes of the list of its values;
* None, and two of these kinds in one field: an error that says so.

``torch.utils.data.default_collate`` makes lists, which must then be of equal length, a list of columns; it takes no
other objects, and the dtype of the first sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipegraph.columns import (
    ARRAYS,
    AS_IN_TORCH,
    SCALARS,
    Columns,
    columns_of,
    dtype_of,
    fit,
    is_a_tuple,
    joined_name,
)
from pipegraph.errors import DataError
from pipegraph.tree import is_dataclass_value, is_namedtuple, rebuilt

if TYPE_CHECKING:
    from pipegraph.operators.padding import Pad

_NUMERIC = "biufc"


def collate(items: Sequence[Any], rules: Any = None, field: str = "") -> Any:
    """The batch of some samples, at least one; see the module docstring.

    Args:
        rules: what fills arrays and lists of numbers up to the largest of the batch, a value or a ``Pad``; None makes
            arrays of several shapes an error and leaves lists as they are. A mapping gives one per field name, or a
            function that makes the field of the list of its values.
        field: where in the sample this is, for messages.
    """
    return batch_of([_columns(items, rules, field)], rules, field)


def _check_names(samples: Columns, rules: Mapping[Any, Any]) -> None:
    """Raises DataError where a rule is for a field that the samples do not have, such as a misspelt one."""
    there = set(_names(samples))
    unknown = next((name for name in rules if name not in there), None)
    if unknown is not None:
        option = "collate" if callable(rules[unknown]) else "pad"
        raise DataError(
            f"Batch: {option} names the field {unknown!r}, which the samples do not have; they have "
            f"{', '.join(map(repr, sorted(there - {''}))) or 'none'}"
        )


def _names(column: Columns, field: str = "") -> Iterator[str]:
    """Of the samples ("") and their fields, at any depth."""
    yield field
    if isinstance(column.data, dict):
        for name, below in column.data.items():
            yield from _names(below, joined_name(field, name))


def batch_of(parts: Sequence[Columns], rules: Any, field: str = "") -> Any:
    """As :func:`collate`, of several parts laid end to end."""
    rule = None
    if rules is not None:
        rule = _rule(rules, field)
        if callable(rule):
            return rule(_rows(parts))
    if len(parts) > 1 and not fit(parts):
        parts = [_columns(_rows(parts), rules, field)]
    first = parts[0]
    pad = _pad(rule)
    if not field and isinstance(rules, Mapping):
        _check_names(first, rules)
    if isinstance(first.data, dict):
        return _batch_of_fields(parts, rules, field)
    made = _end_to_end(parts)
    if made is None:
        made = _batch_of_values(_rows(parts), rule if pad is None else pad.value, field)
    if pad is None or not isinstance(made, torch.Tensor) or made.dim() < 2:
        return made
    longest = made.shape[1]
    size = pad.size(longest, field)
    if size == longest:
        return made
    grown = _full(made, (len(made), size, *made.shape[2:]), pad.value, field)
    grown[:, :longest] = made
    return grown


def _pad(rule: Any) -> Pad | None:
    if rule is None:
        return None
    from pipegraph.operators.padding import Pad

    return rule if isinstance(rule, Pad) else None


def _columns(items: Sequence[Any], rules: Any, field: str) -> Columns:
    if isinstance(rules, Mapping):
        return columns_of(items, lambda name: callable(rules.get(name)), field)
    padded = rules is not None and isinstance(items[0], list)  # as values, not as samples with columns
    return columns_of(items, (lambda name: True) if padded else None, field)


def _rows(parts: Sequence[Columns]) -> list[Any]:
    return [row for part in parts for row in part.rows()]


def _where(field: str) -> str:
    return f"field {field!r}" if field else "the samples"


def _named(item: Any) -> str:
    dtype = f" of {item.dtype}" if isinstance(item, np.ndarray | torch.Tensor) else ""
    return f"{type(item).__name__}{dtype}"


# -- rules by field ----------------------------------------------------------------------------------


def _rule(rules: Any, field: str) -> Any:
    return rules.get(field) if isinstance(rules, Mapping) else rules


# -- columns to a batch ------------------------------------------------------------------------------


def _batch_of_fields(parts: Sequence[Columns], rules: Any, field: str) -> Any:
    """Containers of the kind of the samples', with a column for each of their fields."""
    first = parts[0]
    like = () if first.kind in (tuple, list) else {} if first.items is None else first.items[0]
    named = isinstance(like, Mapping)
    made: dict[Any, Any] = {}
    beside: dict[Any, Any] = {}
    for name in first.data:
        columns, within = [part.data[name] for part in parts], joined_name(field, name)
        made[name] = value = batch_of(columns, rules, within)
        pad = None if rules is None else _pad(_rule(rules, within))
        if named and pad is not None and isinstance(value, torch.Tensor) and value.dim() > 1:
            added = pad.fields(str(name), [len(each) for each in _rows(columns)], value.shape[1])
            if taken := [each for each in added if each in first.data or each in beside]:
                raise DataError(
                    f"{_where(joined_name(field, taken[0]))}: there is such a field already; give Pad(mask=..., "
                    f"lengths=...) of {name!r} other names"
                )
            beside |= added
    if is_a_tuple(like) or isinstance(like, list):
        return tuple(made.values())
    if beside or (named and first.items is not None and len(set(map(type, first.items))) > 1):
        return made | beside
    return rebuilt(like, list(made.values())) if first.items is not None else made


def _end_to_end(parts: Sequence[Columns]) -> Any:
    """The tensor or the list of parts that fit; None where there is no such tensor."""
    first, fresh = parts[0].data, len(parts) == 1 and parts[0].items is not None
    if parts[0].kind is None:
        return None
    if isinstance(first, list):
        return first if fresh else [item for part in parts for item in part.data]
    # A part of a larger array would keep the rest of it for as long as the batch lives.
    if isinstance(first, np.ndarray):
        try:
            whole = fresh or (len(parts) == 1 and _has_its_own_memory(first))
            made = first if whole else np.concatenate([part.data for part in parts])
            return torch.from_numpy(
                made if made.dtype.isnative else made.astype(made.dtype.newbyteorder("="))
            )
        except TypeError:  # unsigned long long, which NumPy holds for equal to unsigned long
            return None
    if fresh or (len(parts) == 1 and first.nbytes == first.untyped_storage().nbytes()):
        return first
    return torch.cat([part.data for part in parts])


def _has_its_own_memory(array: np.ndarray) -> bool:
    """Whether nothing but the array lies in the memory that it keeps; torch needs to write to it, too."""
    base = array.base
    return array.flags.writeable and (base is None or memoryview(base).nbytes == array.nbytes)  # type: ignore[arg-type]


# -- values that are not alike -----------------------------------------------------------------------


def _batch_of_values(items: Sequence[Any], pad: Any, field: str) -> Any:
    kind = _kind_of_all(items, field)
    if kind == "number":
        if pad is not None and (padded := _padded_arrays(items, pad, field)) is not None:
            return padded
        return _stack([_tensor(item) for item in items], pad, field)
    if kind == "list" and pad is not None:
        return _padded_lists(items, pad, field)
    if kind == "mapping":
        number, item = next((n, item) for n, item in enumerate(items) if item.keys() != items[0].keys())
        odd = sorted(map(str, item.keys() ^ items[0].keys()))
        raise DataError(
            f"samples of one batch must have the same fields: sample {number} and sample 0 differ in "
            f"{', '.join(odd)}; give all samples the same fields with a Map before Batch"
        )
    if kind == "tuple" or (kind == "list" and not field):
        odd_length = next(len(item) for item in items if len(item) != len(items[0]))
        remedy = "use pad=0, " if kind == "list" else "what varies in length must be a list; "
        raise DataError(
            f"{_where(field)}: {kind}s of {len(items[0])} and {odd_length} entries do not make one batch: {remedy}or "
            "use Batch(..., collate=list)"
        )
    return list(items)


def _kind_of_all(items: Sequence[Any], field: str) -> Any:
    """The kind that all samples have."""
    kind = _kind_of(items[0])
    if kind is None and all(item is None for item in items):
        raise DataError(
            f"{_where(field)}: None in all samples: a batch has no place for None; fill or drop it with a Map "
            "before Batch, or use Batch(..., collate=list)"
            + ("" if field else " (does the function before it end without a return?)")
        )
    seen: set[object] = set()
    for number, item in enumerate(items):
        type_of = item.dtype if item.__class__ is np.ndarray else type(item)
        if type_of in seen:
            continue
        if _kind_of(item) != kind:
            raise DataError(
                f"{_where(field)}: {_named(items[0])} in sample 0 and {_named(item)} in sample {number} do not make "
                "one batch; make all samples alike with a Map before Batch, or use Batch(..., collate=list)"
            )
        seen.add(type_of)
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
    return "tuple" if isinstance(item, tuple) else "list" if isinstance(item, list) else "other"


def _tensor(item: Any) -> torch.Tensor:
    if isinstance(item, torch.Tensor):
        return item
    if not isinstance(item, np.ndarray | np.generic):
        item = np.asarray(item, next((SCALARS[k] for k in SCALARS if isinstance(item, k)), np.complex128))
    elif item.__class__ is np.ndarray and item.flags.carray and item.dtype.isnative:
        return torch.from_numpy(item)
    # torch takes neither foreign byte order nor negative strides, and warns of memory that is read-only.
    array = np.ascontiguousarray(item, dtype=item.dtype.newbyteorder("=")).reshape(item.shape)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _promoted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the one dtype that holds them all, as torch promotes."""
    dtypes = set(map(dtype_of, tensors))
    if len(dtypes) == 1:
        return tensors
    dtype = reduce(torch.promote_types, dtypes)
    return [tensor.to(dtype) for tensor in tensors]


def _stack(tensors: list[torch.Tensor], pad: Any, field: str) -> torch.Tensor:
    tensors = _promoted(tensors)
    shape = tensors[0].shape
    if all(tensor.shape == shape for tensor in tensors):
        return torch.stack(tensors)
    other = [tensor.shape for tensor in tensors if tensor.dim() != len(shape)]  # which no padding makes equal
    if pad is None or other:
        odd = other[0] if other else next(tensor.shape for tensor in tensors if tensor.shape != shape)
        padded = "pad needs as many dimensions in each" if other else "or use Batch(..., pad=0)"
        raise DataError(
            f"{_where(field)}: arrays of shapes {tuple(shape)} and {tuple(odd)} cannot be stacked; "
            f"make them equal before Batch{'; ' if other else ', '}{padded}, or keep them as a list: "
            + (f"Batch(..., collate={{{field!r}: list}})" if field else "Batch(..., collate=list)")
        )
    filling = _full(tensors[0], (1,), pad, field)
    largest = [max(tensor.shape[i] for tensor in tensors) for i in range(len(shape))]
    stacked = filling.repeat(len(tensors), *largest)
    for row, tensor in enumerate(tensors):  # not over views of rows, which take no tensors with gradients
        stacked[(slice(row, row + 1), *(slice(0, n) for n in tensor.shape))] = tensor
    return stacked


def _padded_arrays(items: Sequence[Any], pad: Any, field: str) -> Any:
    """A tensor of arrays of one dtype that differ in their length alone; None of anything else. In NumPy, in half the
    time: each call of torch gives up the GIL, and with it the turn."""
    if not set(map(type, items)) <= ARRAYS | {torch.Tensor}:
        return None
    try:
        arrays: list[Any] = [item if item.__class__ in ARRAYS else item.numpy() for item in items]
        dtype, of = arrays[0].dtype, arrays[0].shape[1:]
        if dtype not in AS_IN_TORCH or any(each.dtype != dtype or each.shape[1:] != of for each in arrays):
            return None
        lengths = list(map(len, arrays))
    except (TypeError, RuntimeError):  # of no dimensions, and tensors that NumPy does not know
        return None
    filling = _full(torch.from_numpy(np.empty(0, dtype)), (1,) * arrays[0].ndim, pad, field).numpy()
    padded = np.full((len(arrays), max(lengths), *of), filling)
    for row, array, length in zip(padded, arrays, lengths, strict=True):
        row[:length] = array
    return torch.from_numpy(padded)


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


def _padded_lists(items: Sequence[list[Any]], pad: Any, field: str) -> Any:
    """Lists of numbers, of lists of them and so on, as one padded tensor; what is empty counts as ``pad`` does."""
    kinds = {*map(type, chain.from_iterable(items)), type(pad)}
    if not kinds <= SCALARS.keys():
        return _filled([_nested(item, pad, field) for item in items], pad, field)
    dtype = np.result_type(*(SCALARS[kind] for kind in kinds))
    return _padded_arrays([np.asarray(item, dtype) for item in items], pad, field)


def _nested(value: Any, pad: Any, field: str) -> torch.Tensor:
    if isinstance(value, list | tuple):
        return _filled([_nested(each, pad, field) for each in value], pad, field)
    if _kind_of(value) != "number":
        raise DataError(
            f"{_where(field)}: pad={pad!r} fills lists of numbers, this one holds {_named(value)}; name the fields to "
            "fill: Batch(..., pad={'field': 0})"
        )
    return _tensor(value)


def _filled(tensors: list[torch.Tensor], pad: Any, field: str) -> torch.Tensor:
    empty = _tensor(pad).reshape(-1)[:0]
    if not tensors:
        return empty
    dims = max(tensor.dim() for tensor in tensors)
    shaped = [t.reshape((0,) * dims) if t.shape == (0,) and dims else t for t in tensors]
    dtype = _promoted([*shaped, empty])[-1].dtype
    return _stack([tensor.to(dtype) for tensor in shaped], pad, field)
