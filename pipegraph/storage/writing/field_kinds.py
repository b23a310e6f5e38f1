"""The kind of value in each field, the same for all samples of a dataset. Pure."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import Any, Final

import numpy as np

from pipegraph.errors import DataError, note, shown

Kinds = dict[str, str]
"""Field -> ``"bytes"``, ``"text"``, ``"bool"``, ``"int"``, ``"float"``, ``"array:DTYPE"`` or ``"json"``; ``"null"`` or
``"empty list"`` where no value has said one of these."""

PROBES: Final = 64
"""Samples from which the kinds of fields are taken: spread over a dataset, or the first of a stream, until they say."""

_UNDECIDED: Final = frozenset({"null", "empty list"})


_CONVERT: Final = "convert it to numbers, text or bytes, as with .float() or .filled(0)"


def number_of(value: Any) -> Any:
    """A tensor or array of one number, without a dimension, as that number; anything else as it is."""
    if getattr(value, "ndim", 1) or not hasattr(value, "item"):
        return value
    dtype = getattr(value, "dtype", None)
    return value if isinstance(dtype, np.dtype) and dtype.kind not in "biuf" else value.item()


def refuse_odd_names(sample: Mapping[Any, Any]) -> None:
    """Raises DataError for a field whose name is no text."""
    for name in sample:
        if not isinstance(name, str):
            raise DataError(f"the names of fields are texts, got {name!r}; write {str(name)!r}")


def kind_of(value: Any) -> str:
    """The kind of one value: lists of numbers are arrays, other lists and dicts JSON; an empty list may be either."""
    value = number_of(value)
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float | np.floating):
        return "float"
    value = array_of(value)
    if isinstance(value, np.ndarray):
        return f"array:{value.dtype.newbyteorder('=').name}"
    if isinstance(value, list | tuple):
        if not value:
            return "empty list"
        kinds = {kind_of(each) for each in value}
        if kinds <= {"int", "float"}:
            return "array:float64" if "float" in kinds else "array:int64"
    return "json"


def array_of(value: Any) -> Any:
    """A tensor of torch's, which is not needed to write shards, as an array of its values; anything else as it is."""
    try:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("a masked array has no values under its mask")
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:  # of a tensor without a twin in NumPy
        raise TypeError(f"{error}; {_CONVERT}") from error
    return value


def kinds_of(samples: Iterable[tuple[int, Mapping[str, Any]]]) -> Kinds:
    """The kinds of the fields of all these samples, given with their numbers."""
    found: Kinds | None = None
    for number, sample in samples:
        try:
            found = joined(found, sample, number)
        except DataError as error:
            note(error, f"{_called(sample, number)} of the source")
            raise
    return found or {}


def joined(kinds: Kinds | None, sample: Mapping[str, Any], number: int) -> Kinds:
    """The kinds that samples have together with one more; None where it is the first.

    Raises:
        DataError: it has other fields or kinds.
    """
    if kinds is None:
        kinds = dict.fromkeys(sample, "null")
    refuse_other_fields(sample, kinds, number)
    return {
        **kinds,
        **{name: _joined(kinds[name], _kind_in(name, value), name) for name, value in sample.items()},
    }


def undecided(kinds: Kinds) -> bool:
    """Whether no value has said yet what some field holds."""
    return not _UNDECIDED.isdisjoint(kinds.values())


def _called(sample: Mapping[str, Any], number: int) -> str:
    key = sample.get("key")
    return f"sample {number} ({key!r})" if isinstance(key, str) else f"sample {number}"


def _kind_in(field: str, value: Any) -> str:
    try:
        return kind_of(value)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"field {field!r} has no place in a shard: {error}") from error


def _joined(one: str, other: str, field: str) -> str:
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    if {one, other} in ({"int", "float"}, {"array:int64", "array:float64"}):  # whole numbers among others
        return "float" if one in ("int", "float") else "array:float64"
    if "empty list" in (one, other) and (found := other if one == "empty list" else one).startswith(
        ("array", "json")
    ):
        return found
    raise DataError(
        f"field {field!r} is {one} in one sample and {other} in another; make all values of a field alike"
    )


def fitted(value: Any, kind: str, field: str) -> Any:
    """The value as the plain type of its kind: an int, an array of the dtype, a JSON text ...; None stays None."""
    if value is None:
        return None
    found = _kind_in(field, value)
    try:
        if kind.startswith("array:") and found.startswith(("array:", "empty")):
            return _array(value, found, np.dtype(kind.partition(":")[2]))
        if kind == "json" and found in ("json", "empty list"):
            return as_json(value)
        if found == kind or (kind, found) == ("float", "int"):
            plain = _PLAIN.get(kind, as_json)(value)
            if found != kind and plain != number_of(value):
                raise TypeError(f"{shown(value)} would change as a float")
            return plain
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"field {field!r} holds {kind} in this dataset, not this value: {error}") from error
    remedy = {
        "empty list": "write the empty ones with their type, as np.array([], 'int64') or another dtype",
        "null": "leave the field out of all, or give one of the first samples a value",
    }.get(kind, "make all values of a field alike")
    raise DataError(
        f"field {field!r} holds {kind} in the samples that were looked at first, and {found} in this one; {remedy}"
    )


def _array(value: Any, found: str, dtype: np.dtype[Any]) -> Any:
    """An array as it is, or a list of numbers that do not change as ones of ``dtype``; floats may be rounded."""
    if not isinstance(value, list | tuple):
        array = array_of(value)
        if array.dtype.newbyteorder("=") != dtype:
            raise TypeError(f"an array of {array.dtype}")
        return np.ascontiguousarray(array, dtype)
    numbers = list(value) if set(map(type, value)) <= {int, float} else list(map(number_of, value))
    if numbers and dtype.kind not in ("f" if found == "array:float64" else "iuf"):
        raise TypeError(f"{shown(value)} would change as {dtype}; write all values of the field as one type")
    with np.errstate(over="ignore"):
        array = np.array(numbers, dtype)
    made = array.tolist()
    differing = ((one, other) for one, other in zip(numbers, made, strict=True) if one != other)
    rounded = (isinstance(one, float) and isfinite(one) == isfinite(other) for one, other in differing)
    if made != numbers and not all(rounded):
        raise TypeError(f"{shown(value)} would change as {dtype}; write all values of the field as one type")
    return array


def fitted_fields(sample: Mapping[str, Any], kinds: Kinds, number: int) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and value of each field, in the order of ``kinds``; a sample without a key has its number as one."""
    refuse_other_fields(sample, kinds, number)
    for field, kind in kinds.items():
        given = sample.get(field)
        yield field, kind, fitted(f"{number:09d}" if field == "key" and given is None else given, kind, field)


def refuse_other_fields(sample: Mapping[str, Any], kinds: Kinds, number: int) -> None:
    """Raises DataError for a sample with a field too many, or one too few that is not its key."""
    odd = next((name for name in sample if name not in kinds), None)
    missing = next((name for name in kinds if name not in sample and name != "key"), None)
    if odd is None and missing is None:
        return
    what = (
        f"has the field {odd!r}, which those looked at first have not"
        if odd is not None
        else (f"lacks the field {missing!r}, which those looked at first have")
    )
    raise DataError(
        f"{_called(sample, number)} {what}; give all samples the same fields, or write tar, where they may differ"
    )


def held(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample that stays what it is now, whatever the user does with the one given; of the same kinds."""
    return {name: _copied(value) for name, value in sample.items()}


def _copied(value: Any) -> Any:
    value = number_of(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    array = array_of(value)
    return array.copy() if isinstance(array, np.ndarray) else copy.deepcopy(value)


_PLAIN: Final = {"int": int, "float": float, "bool": bool, "bytes": bytes, "text": str}


def nbytes_of(value: Any) -> int:
    """About what a value takes."""
    if isinstance(value, str | bytes):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def as_json(value: Any) -> str:
    """JSON that is the same wherever it is made.

    Raises:
        TypeError: a value that JSON has not, or a key that it would make a text.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    if "{" in text:
        _check_keys([value])
    return text


def _check_keys(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, dict):
            if odd := [key for key in value if not isinstance(key, str)]:
                raise TypeError(
                    f"the key {odd[0]!r} would become a text in JSON; make it one with str(), or write a list of pairs"
                )
            _check_keys(value.values())
        elif isinstance(value, list | tuple):
            _check_keys(value)


def _plain(value: Any) -> Any:
    if (
        isinstance(value, np.generic | np.ndarray) and value.dtype.kind not in "mM"
    ):  # nanoseconds would be numbers
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in JSON; {_CONVERT}")
