"""Estimated bytes of objects that are neither containers nor arrays: images of PIL, plain objects, sets, tables."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

UNCOUNTED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""What items share and no item brings along."""

SAMPLED = 32
"""Entries of an array of objects whose sizes stand for all."""

PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2}
"""Bytes per pixel of PIL's modes; four in all others, however many bands they have."""

KNOWN = frozenset({"numpy", "torch", *sys.stdlib_module_names})
"""Packages whose objects without attributes are small, or counted elsewhere."""


def estimate(data: Any) -> tuple[int, Iterable[Any]]:
    """The bytes of an object by itself, and the values in it, whose bytes come on top.

    A library's object that says its bytes is believed: ``nbytes`` (pyarrow, xarray), ``memory_usage()`` (pandas),
    ``estimated_size()`` (polars).
    """
    if isinstance(data, UNCOUNTED) or type(data).__module__.startswith("pipegraph."):
        return 0, ()  # pipegraph's own items, such as a block to be read, refer to what all of them share
    if isinstance(data, set | frozenset | deque):
        return sys.getsizeof(data), data
    stated = _stated(data)
    return (sys.getsizeof(data), attributes_of(data).values()) if stated is None else (stated, ())


def is_unknown(data: Any) -> bool:
    """Whether nothing of an object tells its size: one of a library in C that has no attributes."""
    if isinstance(data, UNCOUNTED) or type(data).__module__.partition(".")[0] in KNOWN:
        return False
    slotted = any("__slots__" in vars(kind) for kind in type(data).__mro__)
    own = sys.getsizeof(data) - type(data).__basicsize__
    return not (hasattr(data, "__dict__") or slotted or own > 64 or _stated(data) is not None)


def of_objects(array: Any) -> int:
    """The bytes of an array of objects, by those of some of them."""
    places = np.linspace(0, array.size - 1, min(array.size, SAMPLED)).astype(np.int64)
    sizes = [sys.getsizeof(array.flat[place]) for place in places]
    return int(array.nbytes + array.size * sum(sizes) / len(sizes))


def _stated(data: Any) -> int | None:
    """What the object itself says."""
    try:
        if hasattr(data, "getbands") and hasattr(data, "mode"):  # an image of PIL
            width, height = data.size
            return int(width * height * PIXEL_BYTES.get(data.mode, 4))
        nbytes = getattr(data, "nbytes", None)
        if isinstance(nbytes, int):
            return nbytes
        if hasattr(data, "memory_usage"):
            return int(np.sum(data.memory_usage()))
        if hasattr(data, "estimated_size"):
            return int(data.estimated_size())
    except Exception:  # a closed file, a class of the user's with such names
        return None
    return None


def attributes_of(data: Any) -> dict[str, Any]:
    """An object's attributes by name, those in slots and in objects of C too."""
    own = getattr(data, "__dict__", None)
    found = dict(own) if isinstance(own, Mapping) else {}
    for kind in type(data).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and name not in found:
                with suppress(AttributeError):  # not set
                    found[name] = slot.__get__(data)
    return found
