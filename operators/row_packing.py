"""A tree of plain values and arrays as bytes, and back; nothing is ever unpickled. Pure.

A JSON header says how the tree is built; the bytes of arrays, tensors and byte strings follow it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from pipegraph.errors import DataError

_MAGIC = b"pgv1"


def pack(tree: Any) -> bytes:
    """Bytes of a tree of dicts, lists, tuples, numbers, text, bytes, arrays and tensors.

    Raises:
        DataError: it holds something else; says what.
    """
    parts: list[bytes] = []
    header = json.dumps(_describe(tree, parts)).encode()
    return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *parts])


def unpack(data: bytes) -> Any:
    """The reverse of :func:`pack`."""
    if data[:4] != _MAGIC or len(data) < 8:
        raise DataError("packed value: not one")
    end = 8 + int.from_bytes(data[4:8], "little")
    try:
        described = json.loads(data[8:end])
    except ValueError as error:
        raise DataError("packed value: its header is broken") from error
    reader = _Reader(data, end)
    tree = reader.build(described)
    if reader.at != len(data):
        raise DataError(f"packed value: {len(data)} bytes, {reader.at} expected")
    return tree


def _describe(value: Any, parts: list[bytes]) -> Any:
    if value is None or value.__class__ in (bool, int, float, str):
        return value
    if value.__class__ is dict:
        if not all(isinstance(key, str) for key in value):
            raise DataError("packed value: only text keys can be kept in a folder; use where='memory'")
        return {"d": [[key, _describe(item, parts)] for key, item in value.items()]}
    if value.__class__ in (list, tuple):
        return {"l" if value.__class__ is list else "t": [_describe(item, parts) for item in value]}
    if value.__class__ is bytes:
        parts.append(value)
        return {"b": len(value)}
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    if dense and value.device.type == "cpu":
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(flat.numpy().tobytes())
        return {"T": str(value.dtype).removeprefix("torch."), "s": list(value.shape)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcUSmM":
        parts.append(np.ascontiguousarray(value).tobytes())
        return {"A": value.dtype.str, "s": list(value.shape), "g": isinstance(value, np.generic)}
    raise DataError(
        f"packed value: a {type(value).__name__} cannot be kept in a folder; use where='memory', or make it an array"
    )


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def _take(self, nbytes: int) -> bytes:
        found = self._data[self.at : self.at + nbytes]
        if len(found) != nbytes:
            raise DataError("packed value: cut short")
        self.at += nbytes
        return found

    def build(self, described: Any) -> Any:
        if described.__class__ is not dict:
            return described
        if "d" in described:
            return {key: self.build(item) for key, item in described["d"]}
        if "l" in described:
            return [self.build(item) for item in described["l"]]
        if "t" in described:
            return tuple([self.build(item) for item in described["t"]])
        if "b" in described:
            return self._take(described["b"])
        count = int(np.prod(described["s"], dtype=np.int64))
        if "T" in described:
            dtype = getattr(torch, described["T"])
            raw = bytearray(self._take(count * dtype.itemsize))
            flat = torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)
            return flat.reshape(described["s"])
        dtype = np.dtype(described["A"])
        array = np.frombuffer(self._take(count * dtype.itemsize), dtype).reshape(described["s"]).copy()
        return array[()] if described["g"] else array
