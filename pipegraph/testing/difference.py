"""Shows where two fingerprints differ."""

from __future__ import annotations

from typing import Any

import numpy as np

SHOWN = 200
"""Characters of a value that are shown."""


def difference(one: Any, other: Any, where: str = "") -> str:
    """The first difference between two fingerprints (see ``outcome.fingerprint``): where it is, and both values."""
    at = where or "the data"
    if not isinstance(one, tuple) or not isinstance(other, tuple) or not one or not other:
        return f"{at}: should be {brief(one)}, is {brief(other)}"
    if one[0] != other[0]:
        return f"{at}: should be of type {brief(one[0])}, is {brief(other[0])}: {brief(one)}, {brief(other)}"
    kind = one[0]
    if kind in ("tensor", "array"):
        return _arrays(one, other, at)
    if kind == "mapping":
        return _mappings(one, other, where)
    for number, (a, b) in enumerate(zip(one[1:], other[1:], strict=False)):
        if a != b:
            return difference(a, b, f"{where}[{number}]")
    return f"{at}: should have {len(one) - 1} entries, has {len(other) - 1}"


def _mappings(one: Any, other: Any, where: str) -> str:
    expected, found = dict(one[1:]), dict(other[1:])
    for key, value in expected.items():
        if key not in found:
            return f"{where or 'the data'}: key {key!r} is missing; it has {brief(list(found))}"
        if value != found[key]:
            return difference(value, found[key], f"{where}[{key!r}]")
    return f"{where or 'the data'}: has keys that it should not have: {brief([k for k in found if k not in expected])}"


def _arrays(one: Any, other: Any, at: str) -> str:
    kind, dtype, shape, data = one
    if (dtype, shape) != other[1:3]:
        return f"{at}: should be a {kind} of {dtype} {shape}, is of {other[1]} {other[2]}"
    name = dtype.removeprefix("torch.")
    try:
        a, b = (np.frombuffer(each, np.dtype(name)) for each in (data, other[3]))
    except TypeError:  # one that numpy does not know: by bytes
        a, b = (np.frombuffer(each, np.uint8) for each in (data, other[3]))
        shape = a.shape
    differs = (
        np.flatnonzero(a.view(np.uint8).reshape(a.size, -1) != b.view(np.uint8).reshape(b.size, -1))
        if a.size
        else a
    )
    first = int(differs[0]) // a.itemsize
    count = len(np.unique(differs // a.itemsize))
    index = [int(i) for i in np.unravel_index(first, shape)]
    return f"{at}: {count} of {a.size} values differ; at {index} it should be {a[first]}, is {b[first]}"


def brief(value: Any) -> str:
    """The ``repr`` of a value, cut."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
