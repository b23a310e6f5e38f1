"""What a shard encoder does, and the kind of value in each field. Pure."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np

from pipegraph.errors import DataError, shown

Kinds = dict[str, str]
"""Field -> ``"bytes"``, ``"text"``, ``"bool"``, ``"int"``, ``"float"``, ``"array:DTYPE"`` or ``"json"``; ``"null"`` or
``"empty list"`` where no value has said one of these."""

UNDECIDED: Final = ("null", "empty list")

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


def _called(sample: Mapping[str, Any], number: int) -> str:
    key = sample.get("key")
    return f"sample {number} ({key!r})" if isinstance(key, str) else f"sample {number}"


def kind_in(field: str, value: Any) -> str:
    """As :func:`kind_of`; raises DataError, which names the field."""
    try:
        return kind_of(value)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"field {field!r} has no place in a shard: {error}") from error


def fitted(value: Any, kind: str, field: str) -> Any:
    """The value as the plain type of its kind: an int, an array of the dtype, a JSON text ...; None stays None."""
    if value is None:
        return None
    found = kind_in(field, value)
    try:
        if kind.startswith("array:") and found.startswith(("array:", "empty")):
            return _array(value, found, np.dtype(kind.partition(":")[2]))
        if kind == "json" and found in ("json", "empty list"):
            return as_json(value)
        if kind == found == "empty list":
            return []
        if found == kind or (kind, found) == ("float", "int"):
            plain = _PLAIN.get(kind, as_json)(value)
            if found != kind and plain != number_of(value):
                raise TypeError(f"{shown(value)} would change as a float")
            return plain
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"field {field!r} holds {kind} in this dataset, not this value: {error}") from error
    if kind == "null":
        remedy = "leave the field out of all, or give one of the first samples a value"
    elif kind == "empty list":
        remedy = "write the empty ones with their type, as np.array([], 'int64') or another dtype"
    else:
        remedy = "make all values of a field alike"
    raise DataError(f"field {field!r} holds {kind} in the samples before, and {found} in this one; {remedy}")


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


def refuse_other_fields(sample: Mapping[str, Any], kinds: Kinds, number: int) -> None:
    """Raises DataError for a sample with a field too many, or one too few that is not its key."""
    odd = next((name for name in sample if name not in kinds), None)
    missing = next((name for name in kinds if name not in sample and name != "key"), None)
    if odd is None and missing is None:
        return
    what = (
        f"has the field {odd!r}, which the first one has not"
        if odd is not None
        else (f"lacks the field {missing!r}, which the first one has")
    )
    raise DataError(
        f"{_called(sample, number)} {what}; give all samples the same fields, or write tar, where they may differ"
    )


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


Sample = Mapping[str, Any]


class Encoder(ABC):
    """Writes shards to files, one after the other. The same samples give the same bytes.

    Attributes:
        format: the name by which users ask for it.
        shard_name: of a shard, by its number; its suffix is that of a registered format, which reads it.
        kinds: of the fields, where all samples have the same ones, as far as the samples so far have said them.
        samples: written so far.
    """

    format: ClassVar[str]
    shard_name: ClassVar[str]
    samples: int = 0

    def __init__(self, kinds: Kinds | None = None) -> None:
        self.kinds = dict(kinds or {})

    @abstractmethod
    def encode(self, sample: Sample, number: int) -> Any:
        """What :meth:`add` takes, and of which :meth:`size` tells the bytes; the sample's number is its key, where it
        has none.

        Raises:
            DataError: the format has no place for a value; names the field.
        """

    @abstractmethod
    def size(self, encoded: Any) -> int:
        """The bytes that a sample adds to a shard, as far as that is known before the shard is finished."""

    @abstractmethod
    def begin(self, file: BinaryIO) -> None:
        """A new shard begins."""

    @abstractmethod
    def add(self, encoded: Any) -> None:
        """The shard's next sample."""

    @abstractmethod
    def finish(self) -> None:
        """The shard ends."""
