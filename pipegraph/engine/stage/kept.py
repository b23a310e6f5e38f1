"""What an operator keeps, as JSON and back: plain values, arrays, tensors, bytes, and chunks that it holds."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pipegraph.chunk import Chunk, Lineage
from pipegraph.engine.stage.cursors import freeze

TAG = "pipegraph"
"""The key under which a dict says what it stands for."""

_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any) -> Any:
    """JSON of a value, sharing nothing with it; what has no form here is copied as it is."""
    kind = value.__class__
    if kind in _PLAIN:
        return value
    if kind is dict:
        if all(key.__class__ is str for key in value) and TAG not in value:
            return {key: encode(each) for key, each in value.items()}
        return {TAG: "dict", "items": [[encode(key), encode(each)] for key, each in value.items()]}
    if kind is list:
        return [encode(each) for each in value]
    if kind is tuple:
        return {TAG: "tuple", "items": [encode(each) for each in value]}
    if kind is Chunk:
        return _encode_chunk(value)
    if kind is bytes:
        return {TAG: "bytes", "data": _text(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {
            TAG: "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "data": _text(np.ascontiguousarray(value).tobytes()),
        }
    if kind is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {
            TAG: "tensor",
            "dtype": dtype,
            "shape": list(value.shape),
            "data": _text(flat.numpy().tobytes()),
        }
    return copy.deepcopy(value)


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
    if value.__class__ is not dict:
        return value if value.__class__ in _PLAIN else copy.deepcopy(value)
    tag = value.get(TAG)
    if tag is None:
        return {key: decode(each) for key, each in value.items()}
    if tag == "dict":
        return {decode(key): decode(each) for key, each in value["items"]}
    if tag == "tuple":
        return tuple([decode(each) for each in value["items"]])
    if tag == "chunk":
        chunk = Chunk(
            decode(value["data"]), freeze(value["rows"]), value["epoch"], keys=decode(value["keys"])
        )
        chunk.batched = value["batched"]
        chunk.paths = freeze(value["paths"])
        return chunk
    data = base64.b64decode(value["data"])
    if tag == "bytes":
        return data
    if tag == "tensor":
        dtype = getattr(torch, value["dtype"])
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    array = np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if tag == "array" else array[()]


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
