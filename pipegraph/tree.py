"""Nested containers (tuples, named tuples, dataclasses, mappings, lists): their leaves, copies and bytes."""

from __future__ import annotations

import copy
import dataclasses
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

ATOMS = frozenset(
    {int, float, bool, complex, type(None), np.float32, np.float64, np.int64, np.int32, np.bool_}
)
PLAIN = ATOMS | {str, bytes, np.ndarray, torch.Tensor}
"""Types of nearly all leaves."""

LONG_TEXT = 64
"""Characters from which on text inside a sample counts: shorter ones, such as keys, are not what fills memory."""


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


def is_dataclass_value(data: Any) -> bool:
    """Whether ``data`` is an instance of a dataclass, and so a container here."""
    return hasattr(
        type(data), "__dataclass_fields__"
    )  # asked of every leaf: as dataclasses has it, in one step


def with_fields(data: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass instance with these fields; ``__init__`` and its checks, made for samples, do not run."""
    made = copy.copy(data)
    for name, value in values.items():
        object.__setattr__(made, name, value)  # frozen ones too
    return made


def is_namedtuple(data: Any) -> bool:
    """Whether ``data`` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def rebuilt(like: Any, entries: Sequence[Any]) -> Any:
    """A container of the kind of ``like`` with other entries: of its keys, places or fields, in their order.

    What else it holds, such as the attributes of a subclass, is kept; ``__init__`` and ``__new__``, which may take
    something else than entries, do not run.
    """
    kind = type(like)
    if kind is list or kind is tuple:
        return kind(entries)
    if isinstance(like, tuple):
        return _rebuilt_tuple(like, entries)
    if isinstance(like, list):
        made: Any = copy.copy(like)
        list.__setitem__(made, slice(None), entries)  # its own may refuse, or check
        return made
    if is_dataclass_value(like):
        return with_fields(like, {f.name: e for f, e in zip(dataclasses.fields(like), entries, strict=True)})
    if type(like) is dict or not isinstance(like, MutableMapping):
        return dict(zip(like, entries, strict=True))
    fresh = copy.copy(like)  # with its default factory, and whatever else it has
    for key, entry in zip(like, entries, strict=True):
        fresh[key] = entry
    return fresh


def _rebuilt_tuple(like: tuple[Any, ...], entries: Sequence[Any]) -> Any:
    kind: Any = type(like)
    if len(entries) == len(like) and all(map(operator.is_, entries, like)) and not hasattr(like, "__dict__"):
        return like
    try:
        made = tuple.__new__(kind, entries)
    except TypeError:  # one of C's, as torch.max returns it
        return kind(entries)
    if hasattr(like, "__dict__"):
        made.__dict__.update(like.__dict__)
    return made


def named(data: Any) -> Mapping[Any, Any] | None:
    """What a container holds, by key, place or field; None for a leaf."""
    if isinstance(data, Mapping):
        return data
    if is_namedtuple(data):
        return dict(zip(data._fields, data, strict=True))
    if isinstance(data, list | tuple):
        return dict(enumerate(data))
    if is_dataclass_value(data):
        return {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return None


def _below(data: Any) -> Collection[Any] | None:
    """The entries of a container; None for a leaf."""
    if isinstance(data, Mapping):
        return data.values()
    if isinstance(data, list | tuple):
        return data
    if is_dataclass_value(data):
        return [getattr(data, field.name) for field in dataclasses.fields(data)]
    return None


def leaves(data: Any) -> Iterator[Any]:
    """The leaves of a tree, containers in their own order."""
    if type(data) in PLAIN or (below := _below(data)) is None:
        yield data
    else:
        for value in below:
            yield from leaves(value)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """A tree of the same shape with ``function`` applied to each leaf."""
    if type(data) in PLAIN or (below := _below(data)) is None:
        return function(data)
    return rebuilt(data, [map_leaves(function, value) for value in below])


def own_memory(leaf: Any) -> Any:
    """A copy of an array or tensor in memory of its own: a kept view would keep all that it is cut from."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def copy_containers(data: Any) -> Any:
    """A shallow copy of the containers; arrays and tensors are shared with the original."""
    kind = type(data)
    if kind in PLAIN:
        return data
    if kind is dict:
        return {key: value if type(value) in PLAIN else copy_containers(value) for key, value in data.items()}
    if kind is list:
        return [value if type(value) in PLAIN else copy_containers(value) for value in data]
    if kind is tuple:
        return tuple([value if type(value) in PLAIN else copy_containers(value) for value in data])
    if is_dataclass_value(data) or isinstance(data, dict | list | tuple):
        return map_leaves(lambda leaf: leaf, data)
    return data


def buffers(data: Any) -> tuple[tuple[int, int], ...]:
    """``(identity, nbytes)`` of each distinct buffer under a tree; scalars, short text and plain objects hold none.

    A view counts with its own extent, not with all it is cut from: a row of a dataset that lies
    in memory anyway is as large as the row.
    """
    kind = type(data)
    if kind in ATOMS:
        return ()
    if kind is str:  # a sample of its own, however short
        return ((id(data), sys.getsizeof(data)),) if data else ()
    if kind is bytes or kind is bytearray:
        return ((id(data), len(data)),) if data else ()
    found: dict[int, int] = {}
    if kind is dict:
        for value in data.values():
            _collect(value, found)
    else:
        _collect(data, found)
    return tuple(found.items())


def buffers_of_each(items: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """As :func:`buffers`, of several trees that are only for a while in one list."""
    found: dict[int, int] = {}
    for item in items:
        if item.__class__ is str:
            found[id(item)] = sys.getsizeof(item)
        else:
            _collect(item, found)
    return tuple(found.items())


def _collect(data: Any, found: dict[int, int]) -> None:
    kind = type(data)
    if kind in ATOMS:
        return
    if kind is str:
        if len(data) >= LONG_TEXT:
            found[id(data)] = sys.getsizeof(data)
    elif kind is np.ndarray:
        nbytes = data.nbytes
        if nbytes:
            # The object stands for its memory: asking numpy for the address costs more than all the rest.
            found[id(data)] = nbytes
    elif kind is bytes:
        if data:
            found[id(data)] = len(data)
    elif isinstance(data, torch.Tensor):
        nbytes = data.nbytes if data.layout == torch.strided else 0
        if nbytes:
            if not data.is_contiguous():  # expanded, perhaps: larger than what it lies in
                nbytes = min(nbytes, data.untyped_storage().nbytes())
            found[data.data_ptr()] = nbytes
    elif isinstance(data, np.ndarray):
        if data.nbytes:
            found[id(data)] = int(data.nbytes)
    elif isinstance(data, Mapping):
        for value in data.values():
            _collect(value, found)
    elif isinstance(data, list | tuple):
        if not ATOMS.issuperset(map(type, data)):
            for value in data:
                _collect(value, found)
    elif isinstance(data, bytearray | memoryview):
        nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
        if nbytes:
            found[id(data)] = nbytes
    elif is_dataclass_value(data):
        for value in _below(data) or ():
            _collect(value, found)
    elif hasattr(data, "getbands"):  # an image of PIL
        found[id(data)] = data.width * data.height * len(data.getbands())
    elif isinstance(nbytes := getattr(data, "nbytes", None), int) and nbytes:
        found[id(data)] = nbytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The content of a strided CPU tensor as uint8 (nbytes,): a view where the tensor is contiguous, else a copy."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    plain = plain.resolve_conj().resolve_neg().contiguous()
    # One element counts as contiguous whatever its strides say, and only those of 1 can be viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
