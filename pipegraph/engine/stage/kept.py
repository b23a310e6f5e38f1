"""State of operators and iterators as JSON and back: plain values, containers, arrays, tensors, held chunks."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pipegraph.chunk import Chunk, Lineage
from pipegraph.engine.stage.cursors import freeze
from pipegraph.errors import GraphError, StateError
from pipegraph.tree import is_dataclass_value, is_namedtuple, with_fields

TAG = "pipegraph"
"""The key under which a dict says what it stands for."""

_PLAIN = (str, int, float, bool, type(None))

_FACTORIES = {each.__name__: each for each in (list, dict, set, int, float, str)}
"""Of a ``defaultdict``."""

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
"""By type: its plain values, and the value made of them."""

_NAMED = {kind.__name__: kind for kind in _FORMS}


class _NoForm(TypeError):
    """Of an object; the message is its class."""


def encode_state(value: Any, stage: str) -> Any:
    """As :func:`encode`, for what a stage's operator or iterator has given as its state.

    Raises:
        GraphError: it holds what has no form in JSON; says of which stage it is, and what to do.
    """
    try:
        return encode(value)
    except _NoForm as error:
        raise GraphError(
            f"stage {stage!r}: its state holds {error}, which has no form in JSON, so it could not be saved: "
            "let its state_dict() give plain values, containers, arrays, tensors, bytes, named tuples or dataclasses; "
            "samples that it holds should be made of these when they reach it"
        ) from None


def encode(value: Any) -> Any:
    """JSON of a value, sharing nothing with it.

    Raises:
        TypeError: it holds an object without a form; its message is the object's class.
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
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {
            TAG: "tensor",
            "dtype": dtype,
            "shape": list(value.shape),
            "data": _text(flat.numpy().tobytes()),
        }
    if is_namedtuple(value) or is_dataclass_value(value):
        names = value._fields if is_namedtuple(value) else [each.name for each in dataclasses.fields(value)]
        fields = {name: encode(getattr(value, name)) for name in names}
        return {TAG: "fields", "class": [kind.__module__, kind.__qualname__], "fields": fields}
    bases: tuple[Any, ...] = (str, int, float, dict, list, tuple)
    for base in bases:  # of a class of its own: as JSON would have it
        if isinstance(value, base):
            return encode(base(value))
    raise _NoForm(f"a {kind.__module__}.{kind.__qualname__}")


def _items(value: dict[Any, Any]) -> list[Any]:
    return [[encode(key), encode(each)] for key, each in value.items()]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _encode_chunk(chunk: Chunk) -> dict[str, Any]:
    return {
        TAG: "chunk",
        "data": encode(chunk.data),
        "rows": [list(row) for row in chunk.lineages],
        "keys": None if chunk._keys is None else encode(chunk._keys),
        "epoch": chunk.epoch,
        "batched": chunk.batched,
        "paths": None if chunk.paths is None else [list(path) for path in chunk.paths],
    }


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`; a chunk's cursors are not kept, for its stage gives its outputs their own."""
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
    if tag == "chunk":
        chunk = Chunk(
            decode(value["data"]), freeze(value["rows"]), value["epoch"], keys=decode(value["keys"])
        )
        chunk.batched = value["batched"]
        chunk.paths = freeze(value["paths"])
        return chunk
    data = base64.b64decode(value["data"])
    if tag == "tensor":
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    array = np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if tag == "array" else array[()]


def _decode_fields(name: tuple[str, str], fields: dict[str, Any]) -> Any:
    """A named tuple or a dataclass. Its module is not imported for it: a state comes from a file."""
    found: Any = sys.modules.get(name[0])
    for part in name[1].split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make"):
        return found(**fields)
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        return with_fields(found.__new__(found), fields)
    raise StateError(
        f"the state holds a {'.'.join(name)}, which is not there: import or define it before the state is loaded"
    )


def lineages(value: Any) -> Iterator[Lineage]:
    """Of every sample in encoded chunks; lists that may be a sample's lineage count as one."""
    if value.__class__ is list:
        if len(value) > 1 and value[0].__class__ is str and value[1].__class__ is int:
            yield freeze(value)
        for each in value:
            yield from lineages(each)
    elif value.__class__ is dict:
        if value.get(TAG) == "chunk":
            yield from freeze(value["rows"])
            return
        for each in value.values():
            yield from lineages(each)
