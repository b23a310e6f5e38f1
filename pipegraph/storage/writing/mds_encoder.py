"""MDS shards, as MosaicML Streaming reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any, BinaryIO, Final

import numpy as np

from pipegraph.errors import DataError
from pipegraph.storage.formats.mds import ARRAY_DTYPES, SCALARS
from pipegraph.storage.formats.offset_table import table_nbytes
from pipegraph.storage.manifest import PartIndex

from .encoder import Encoder, Sample
from .field_kinds import Kinds, fitted_fields

_ENCODINGS: Final = {
    "bytes": "bytes",
    "text": "str",
    "bool": "uint8",
    "int": "int",
    "float": "float64",
    "json": "json",
    "empty list": "json",
}
_SIZES: Final = {"uint8": 1, "int": 8, "float64": 8}
MAX_NBYTES: Final = (1 << 32) - 1
"""Offsets in a shard have 32 bits."""


class MdsEncoder(Encoder):
    """One column per field, in the order of their names.

    A shard is held in memory until it is finished, since its offsets come first.
    """

    format = "mds"
    shard_name = "shard.{:05d}.mds"

    def __init__(self, kinds: Kinds, size: int) -> None:
        super().__init__({name: kinds[name] for name in sorted(kinds)}, size)
        encodings = [_encoding(name, kind) for name, kind in self.kinds.items()]
        self.config = {
            "column_encodings": encodings,
            "column_names": list(self.kinds),
            "column_sizes": [_SIZES.get(each) for each in encodings],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": size,
            "version": 2,
        }
        self._head = json.dumps(self.config, sort_keys=True).encode()
        self._file: BinaryIO
        self._held: list[bytes] = []

    def encode(self, sample: Sample, number: int) -> bytes:
        sizes, values = [], []
        for field, kind, value in fitted_fields(sample, self.kinds, number):
            if value is None:
                raise DataError(
                    f"sample {number}: field {field!r} is None or missing, which MDS has no place for; fill it, or "
                    "write parquet"
                )
            data = _value(value, kind, field)
            if kind not in ("int", "float", "bool"):
                sizes.append(len(data))
            values.append(data)
        return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values)

    def size(self, encoded: bytes) -> int:
        return len(encoded) + 4

    def begin(self, file: BinaryIO) -> None:
        self._file, self._held, self.samples, self._nbytes = file, [], 0, 0

    def add(self, encoded: bytes) -> None:
        self._held.append(encoded)
        self.samples += 1
        self._nbytes += len(encoded)
        if self._nbytes + table_nbytes(self.samples) + len(self._head) > MAX_NBYTES:
            raise DataError(f"an MDS shard takes at most {MAX_NBYTES} bytes; pack with a smaller size")

    def finish(self) -> None:
        start = table_nbytes(self.samples) + len(self._head)
        ends = start + np.cumsum([0, *map(len, self._held)])
        self._file.write(struct.pack("<I", self.samples) + ends.astype("<u4").tobytes() + self._head)
        self._file.writelines(self._held)
        self._held = []

    def index_json(self, shards: Iterable[PartIndex]) -> dict[str, Any]:
        entries = [
            {
                **self.config,
                "raw_data": {"basename": index.part.name, "bytes": index.part.size, "hashes": {}},
                "samples": index.samples,
                "zip_data": None,
            }
            for index in shards
        ]
        return {"shards": entries, "version": 2}


def _encoding(field: str, kind: str) -> str:
    name, _, dtype = kind.partition(":")
    if name == "array":
        if dtype not in ARRAY_DTYPES.values():
            raise DataError(
                f"field {field!r}: MDS has no arrays of {dtype}; convert them to one of {', '.join(SCALARS)}"
            )
        return f"ndarray:{dtype}"
    if name not in _ENCODINGS:
        raise DataError(f"field {field!r} is None in the samples looked at, so it has no type; leave it out")
    return _ENCODINGS[name]


def _value(value: Any, kind: str, field: str) -> bytes:
    if kind == "int":
        try:
            return struct.pack("<q", value)
        except struct.error as error:
            raise DataError(
                f"field {field!r}: {value} does not fit int64, as which MDS keeps whole numbers: write it as text, or "
                "as an array such as np.array([value], np.uint64)"
            ) from error
    if kind == "float":
        return struct.pack("<d", value)
    if kind == "bool":
        return bytes([value])
    if kind in ("text", "json", "empty list"):
        try:
            return bytes(value.encode())
        except UnicodeEncodeError as error:
            raise DataError(f"field {field!r}: {error}") from error
    if kind == "bytes":
        return bytes(value)
    if not value.size or not 1 <= value.ndim < 64:
        raise DataError(
            f"field {field!r}: MDS has no arrays of shape {value.shape}; every dimension must be at least 1"
        )
    width = next(w for w in range(4) if max(value.shape) < 1 << (8 << w))
    shape = np.array(value.shape, f"<u{1 << width}").tobytes()
    values: bytes = value.astype(value.dtype.newbyteorder("<")).tobytes()
    return bytes([value.ndim << 2 | width]) + shape + values
