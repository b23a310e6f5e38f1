"""The kind of value in each field, the same for all samples of a dataset. Pure."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipegraph.errors import DataError, note, shown

Kinds = dict[str, str]
"""Field -> ``"bytes"``, ``"text"``, ``"bool"``, ``"int"``, ``"float"``, ``"array:DTYPE"`` or ``"json"``; ``"null"`` or
``"empty list"`` where no value has said one of these."""

PROBES: Final = 64
"""Samples from which the kinds of fields are taken: spread over a dataset, or the first of a stream, until they say."""

_UNDECIDED: Final = ("null", "empty list")


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
    found: Kinds = {}
    first = ""
    for number, sample in samples:
        called = _called(sample, number)
        try:
            kinds = {name: _kind_in(name, value) for name, value in sample.items()}
            if first and kinds.keys() != found.keys():
                odd = ", ".join(sorted(map(repr, kinds.keys() ^ found.keys())))
                raise DataError(
                    f"samples of one dataset must have the same fields; {called} and {first} differ in {odd}: give all "
                    "of them the same, or write tar, where they may differ"
                )
            for name, kind in kinds.items():
                found[name] = _joined(found[name], kind, name) if first else kind
        except DataError as error:
            note(error, f"{called} of the source")
            raise
        first = first or called
    return found


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
    if {one, other} == {"int", "float"}:
        return "float"
    if {one, other} == {"array:int64", "array:float64"}:  # a list of whole numbers among others
        return "array:float64"
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
    name, _, dtype = kind.partition(":")
    try:
        if name == "array" and (found.startswith("array:") or isinstance(value, list | tuple)):
            array = array_of(value)
            if isinstance(array, np.ndarray) and array.dtype.newbyteorder("=") != np.dtype(dtype):
                raise TypeError(f"an array of {array.dtype}")
            if isinstance(value, list | tuple):
                _check_numbers(value, np.dtype(dtype))
            return np.ascontiguousarray(array, dtype=dtype)
        if found == kind or (kind == "float" and found == "int"):
            if kind == "float":
                _check_numbers((value,), np.dtype(float))
            plain = {"int": int, "float": float, "bool": bool, "bytes": bytes}.get(kind)
            return plain(value) if plain is not None else value if kind == "text" else as_json(value)
        if kind == "json" and found == "empty list":
            return as_json(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"field {field!r} holds {kind} in this dataset, not this value: {error}") from error
    remedy = {
        "empty list": "write the empty ones with their type, as np.array([], 'int64') or another dtype",
        "null": "leave the field out of all, or give one of the first samples a value",
    }.get(kind, "make all values of a field alike")
    raise DataError(
        f"field {field!r} holds {kind} in the samples that were looked at first, and {found} in this one; {remedy}"
    )


def _check_numbers(values: Sequence[Any], dtype: np.dtype[Any]) -> None:
    """Raises TypeError or OverflowError if a number changes by becoming one of ``dtype``; floats may be rounded."""
    kinds = set(map(type, values))
    if kinds == {float} and dtype == np.float64:
        return
    if kinds == {int} and dtype.kind in "iuf":
        exact = 2 ** (np.finfo(dtype).nmant + 1) if dtype.kind == "f" else 0
        least, largest = (-exact, exact) if exact else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if least <= min(values) and max(values) <= largest:
            return
    for value in values:
        if isinstance(value, list | tuple):
            _check_numbers(value, dtype)
            continue
        number = number_of(value)
        if isinstance(number, bool | np.bool_):
            fits = dtype.kind == "b"
        elif isinstance(number, int):
            fits = dtype.kind in "iuf" and int(dtype.type(number)) == number
        elif isinstance(number, float | np.floating):
            size = abs(float(number))
            fits = dtype.kind == "f" and (size <= float(np.finfo(dtype).max) or not np.isfinite(size))
        else:
            array = array_of(number)
            fits = isinstance(array, np.ndarray) and array.dtype.newbyteorder("=") == dtype
        if not fits:
            raise TypeError(
                f"{shown(value)} would change as {dtype}; write all values of the field as one type"
            )


def fitted_fields(sample: Mapping[str, Any], kinds: Kinds, number: int) -> Iterator[tuple[str, str, Any]]:
    """Name, kind and value of each field, in the order of ``kinds``; a sample without a key has its number as one."""
    _refuse_other_fields(sample, kinds, number)
    for field, kind in kinds.items():
        given = sample.get(field)
        yield field, kind, fitted(f"{number:09d}" if field == "key" and given is None else given, kind, field)


def _refuse_other_fields(sample: Mapping[str, Any], kinds: Kinds, number: int) -> None:
    odd = next((name for name in sample if name not in kinds), None)
    if odd is not None:
        raise DataError(
            f"{_called(sample, number)} has the field {odd!r}, which those looked at first have not; give all samples "
            "the same fields, or write tar, where they may differ"
        )
    if len(sample) < len(kinds):
        missing = next((name for name in kinds if name not in sample and name != "key"), None)
        if missing is not None:
            raise DataError(
                f"{_called(sample, number)} lacks the field {missing!r}, which those looked at first have; give all "
                "samples the same fields, or write tar, where they may differ"
            )


class FirstSamples:
    """A stream's first samples, held until a value has said the kind of each field."""

    def __init__(self) -> None:
        self.kinds: Kinds = {}
        self.samples: deque[Mapping[str, Any]] = deque()
        self.nbytes = 0

    def add(self, sample: Mapping[str, Any], number: int) -> bool:
        """Hold the next sample, whose fields' kinds are those of the ones before; a copy, unless it is the first and
        says all kinds. Whether all are known.

        Raises:
            DataError: it has other fields or kinds; it is not held.
        """
        kinds = dict(self.kinds) if self.samples else dict.fromkeys(sample, "null")
        _refuse_other_fields(sample, kinds, number)
        for name, value in sample.items():
            if kinds[name] in _UNDECIDED:
                kinds[name] = _joined(kinds[name], _kind_in(name, value), name)
        known = not any(kind in _UNDECIDED for kind in kinds.values())
        if self.samples or not known:
            sample = {name: _copied(value, kinds[name], name) for name, value in sample.items()}
            self.nbytes += sum(map(nbytes_of, sample.values()))
        self.kinds = kinds
        self.samples.append(sample)
        return known or len(self.samples) >= PROBES


def _copied(value: Any, kind: str, field: str) -> Any:
    """A value that stays what it is now, whatever the user does with the one given; of the same kind."""
    if kind == "json" and value is not None:
        return json.loads(fitted(value, kind, field))
    if kind.startswith("array:") and not isinstance(value, list | tuple) and _kind_in(field, value) == kind:
        return array_of(value).copy()  # also of a dtype that the format refuses later
    value = fitted(value, kind, field)
    if kind == "empty list" and value is not None:
        return []
    return value.copy() if isinstance(value, np.ndarray) else value


def nbytes_of(value: Any) -> int:
    """About what a fitted value takes."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes) else 8


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
