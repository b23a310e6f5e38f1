"""Encodes states of operators and iterators as JSON: plain values, containers, arrays, tensors and held chunks."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pipegraph.chunk import Chunk
from pipegraph.engine.stage.cursors import freeze
from pipegraph.errors import GraphError, StateError
from pipegraph.tree import bytes_of, is_dataclass_value, is_namedtuple

TAG = "pipegraph"
"""The key of a dict that represents another type; its value names the type."""

_PLAIN = (str, int, float, bool, type(None))

_FACTORIES = {each.__name__: each for each in (list, dict, set, int, float, str)}
"""Factories of a ``defaultdict`` that can be encoded."""

_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    deque: (lambda value: [list(value), value.maxlen], lambda made: deque(*made)),
    OrderedDict: (lambda value: [list(each) for each in value.items()], OrderedDict),
    Counter: (lambda value: [list(each) for each in value.items()], lambda made: Counter(dict(made))),
    complex: (lambda value: [value.real, value.imag], lambda made: complex(*made)),
    bytes: (lambda value: _text(value), base64.b64decode),
    bytearray: (lambda value: _text(value), lambda made: bytearray(base64.b64decode(made))),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda made: datetime.timedelta(*made),
    ),
}
"""By type: the function to plain values, and the function back."""

_NAMED = {kind.__name__: kind for kind in _FORMS}


class _NotEncodable(TypeError):
    """An object cannot be encoded; the message is its class."""


def encode_state(value: object, stage: str) -> object:
    """As :func:`encode`, for the state of a stage's operator or iterator.

    Raises:
        GraphError: it holds an object that cannot be encoded; the message names the stage and the remedy.
    """
    try:
        return encode(value)
    except _NotEncodable as error:
        raise GraphError(
            f"stage {stage!r}: its state holds {error}, which has no form in JSON, so it could not be saved: "
            "let its state_dict() give plain values, containers, arrays, tensors, bytes, named tuples or dataclasses; "
            "samples that it holds should be made of these when they reach it"
        ) from None


def encode(value: Any) -> Any:
    """JSON for a value; shares no objects with it.

    Raises:
        TypeError: it holds an object that cannot be encoded; the message is the object's class.
    """
    kind = value.__class__
    if kind in _PLAIN:
        return value
    if kind is dict:
        if all(key.__class__ is str for key in value) and TAG not in value:
            return {key: encode(each) for key, each in value.items()}
        return {TAG: "dict", "items": _items(value)}
    if kind is list:
        return [encode(each) for each in value]
    if kind is Chunk:
        return _encode_chunk(value)
    if kind in _FORMS:
        return {TAG: kind.__name__, "value": encode(_FORMS[kind][0](value))}
    if kind is defaultdict and (
        value.default_factory is None or value.default_factory in _FACTORIES.values()
    ):
        name = None if value.default_factory is None else value.default_factory.__name__
        return {TAG: "defaultdict", "factory": name, "items": _items(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcUSmM":
        return {
            TAG: "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "data": _text(np.ascontiguousarray(value).tobytes()),
        }
    if (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested)
    ):
        dtype = str(value.dtype).removeprefix("torch.")
        return {
            TAG: "tensor",
            "dtype": dtype,
            "shape": list(value.shape),
            "data": _text(bytes_of(value.cpu()).numpy().tobytes()),
        }
    if isinstance(value, type):
        return {TAG: "class", "value": [value.__module__, value.__qualname__]}
    if is_namedtuple(value) or is_dataclass_value(value):
        names = value._fields if is_namedtuple(value) else [each.name for each in dataclasses.fields(value)]
        fields = {name: encode(getattr(value, name)) for name in names}
        return {TAG: "fields", "class": [kind.__module__, kind.__qualname__], "fields": fields}
    bases: tuple[type, ...] = (str, int, float, dict, list, tuple)
    for base in bases:  # a subclass: encoded as its base, as JSON does
        if isinstance(value, base):
            return encode(base(value))
    raise _NotEncodable(f"a {kind.__module__}.{kind.__qualname__}")


def _items(value: dict[object, object]) -> list[object]:
    return [[encode(key), encode(each)] for key, each in value.items()]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _encode_chunk(chunk: Chunk) -> dict[str, object]:
    return {
        TAG: "chunk",
        "data": encode(chunk.data),
        "rows": [list(row) for row in chunk.lineages],
        "keys": None if chunk._keys is None else encode(chunk._keys),
        "epoch": chunk.epoch,
        "batched": chunk.batched,
        "spans": chunk.spans,
        "layout": encode(chunk.layout),
        "paths": None if chunk.paths is None else [list(path) for path in chunk.paths],
    }


def decode(value: object) -> Any:
    """The inverse of :func:`encode`. Cursors of chunks are not kept: a stage sets those of its outputs itself."""
    if value.__class__ is list:
        return [decode(each) for each in value]
    if value.__class__ is tuple:  # JSON's lists, as cursors have them
        return tuple([decode(each) for each in value])
    if value.__class__ is not dict:
        return value
    tag = value.get(TAG)
    if tag is None:
        return {key: decode(each) for key, each in value.items()}
    if tag in _NAMED:
        return _FORMS[_NAMED[tag]][1](decode(value["value"]))
    if tag in ("dict", "defaultdict"):
        found = {decode(key): decode(each) for key, each in value["items"]}
        return found if tag == "dict" else defaultdict(_FACTORIES.get(value["factory"]), found)
    if tag == "fields":
        return _decode_fields(value["class"], decode(value["fields"]))
    if tag == "class":
        return _class(value["value"])
    if tag == "chunk":
        chunk = Chunk(
            decode(value["data"]), freeze(value["rows"]), value["epoch"], keys=decode(value["keys"])
        )
        chunk.batched = value["batched"]
        chunk.paths = freeze(value["paths"])
        chunk.spans = freeze(value.get("spans"))
        chunk.layout = decode(value.get("layout"))
        return chunk
    data = base64.b64decode(value["data"])
    if tag == "tensor":
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    array = np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if tag == "array" else array[()]


def _class(name: tuple[str, str]) -> type[object]:
    """A class by its name. Never imports its module: a state is data from a file."""
    found: Any = sys.modules.get(name[0])
    for part in name[1].split("."):
        found = getattr(found, part, None)
    if isinstance(found, type):
        return found
    raise StateError(
        f"the state holds a {'.'.join(name)}, which is not there: import or define it before the state is loaded"
    )


def _decode_fields(name: tuple[str, str], fields: dict[str, object]) -> object:
    """A named tuple or a dataclass."""
    found: Any = _class(name)
    if issubclass(found, tuple) and hasattr(found, "_make"):
        return found(**fields)
    if dataclasses.is_dataclass(found):
        made: Any = object.__new__(_class(name))
        for field, value in fields.items():  # frozen ones too, and without the checks of __init__
            object.__setattr__(made, field, value)
        return made
    raise StateError(f"the state holds a {'.'.join(name)}, which is no named tuple and no dataclass any more")
