"""MosaicML Streaming's MDS shards, as ``streaming.MDSWriter`` writes them.

After the table of offsets comes the shard's own description as JSON: names, encodings and fixed sizes of the columns.
A sample is the uint32 sizes of its columns of varying size, then the values of all columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from pipegraph.columns import Decode
from pipegraph.errors import DataError, ShardError
from pipegraph.storage.shard_files import ShardFile

from .shard_format import BLOCK_NBYTES, Block, Format, PlacedRows, Sample, blocks_between, check_columns

Offsets = npt.NDArray[np.int64]


def read_offsets(file: ShardFile) -> Offsets:
    """The offset of each sample and of the end, int64 (samples + 1,)."""
    if file.size < 8:
        raise ShardError(f"{file.name}: {file.size} bytes hold no table of samples")
    count = int.from_bytes(file.read_at(0, 4), "little")
    end = 4 + 4 * (count + 1)
    if end > file.size:
        raise ShardError(
            f"{file.name}: says it has {count} samples, whose table takes {end} bytes, but it has {file.size}"
        )
    offsets = np.frombuffer(file.read_at(4, end - 4), "<u4").astype(np.int64)
    if offsets[-1] != file.size:
        raise ShardError(
            f"{file.name}: its samples end at byte {offsets[-1]}, but it has {file.size}; it was cut short or is "
            "another file"
        )
    if offsets[0] < end or (np.diff(offsets) < 0).any():
        raise ShardError(f"{file.name}: the offsets of its samples are not in order")
    return offsets


_MODES: Final = {
    "L": ("u1", 1),
    "LA": ("u1", 2),
    "RGB": ("u1", 3),
    "YCbCr": ("u1", 3),
    "HSV": ("u1", 3),
    "RGBA": ("u1", 4),
    "CMYK": ("u1", 4),
    "I;16": ("<u2", 1),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
}
"""Mode -> dtype and channels, as in NumPy's view of such an image."""


def raw_image(data: bytes) -> Any:
    """The pixels, (H, W) or (H, W, C), as ``numpy.asarray`` gives them of the image."""
    if len(data) < 12:
        raise ValueError("an image without a head")
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + min(length, 16)].decode()
    if mode not in _MODES:
        raise ValueError(f"an image of mode {mode!r}; those read are {', '.join(_MODES)}")
    dtype, channels = np.dtype(_MODES[mode][0]), _MODES[mode][1]
    start = 12 + length
    if width * height * channels * dtype.itemsize != len(data) - start:
        raise ValueError(f"{len(data) - start} bytes are no {mode} image of {width} x {height}")
    pixels = np.frombuffer(data, dtype, width * height * channels, start)
    return pixels.reshape((height, width) if channels == 1 else (height, width, channels)).copy()


_MAX_HEAD_NBYTES: Final = 1 << 20

_DTYPES: Final = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64".split()
SCALARS: Final = {name: np.dtype(name).newbyteorder("<") for name in _DTYPES}

ARRAY_DTYPES: Final = dict(zip((8, 16, 32, 64, 9, 17, 33, 65, 18, 34, 66), _DTYPES, strict=True))
"""The number by which an array says its dtype."""

Decoder = Callable[[bytes], Any]


@dataclass(frozen=True)
class MdsColumns:
    """What an MDS shard says of its samples."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]  # bytes of each column's values, None where they differ


@final
class MdsFormat(Format):
    """``.mds``: one field per column. Values have the types of their encodings.

    ``int`` is an int, ``float32`` and its like NumPy's scalars, ``ndarray`` an array, ``json`` what the JSON says,
    ``pil`` a uint8 array (H, W) or (H, W, C); ``jpeg`` and ``png`` stay encoded, for ``DecodeImage``.
    MdsColumns of pickles (``pkl``) are refused, since reading one runs what it says.

    Args:
        columns: to read; all by default.
    """

    suffixes = (".mds",)
    in_place = True

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self.columns = None if columns is None else tuple(columns)

    def choosing(self, columns: Sequence[str]) -> MdsFormat:
        return MdsFormat(columns)

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        offsets = read_offsets(file)
        read_columns(file, offsets)
        yield from blocks_between(offsets.tolist(), block_nbytes)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        offsets = read_offsets(file)
        found = offsets[block.first : block.first + block.samples + 1] - block.offset
        if len(found) <= block.samples or (found[0], found[-1]) != (0, block.nbytes):
            raise ShardError(
                f"{file.name}: the block at byte {block.offset} is not where the shard has these samples; make the "
                "index anew"
            )
        decode = self._decoder(read_columns(file, offsets), file.name)
        return PlacedRows(file, block.offset, found.tolist(), decode)

    def _decoder(self, columns: MdsColumns, name: str) -> Decode:
        check_columns(self.columns, columns.names, name)
        chosen = frozenset(columns.names if self.columns is None else self.columns)
        decoders: list[tuple[str, int | None, Decoder | None]] = [
            (column, size, _value_decoder(encoding, column, name) if column in chosen else None)
            for column, encoding, size in zip(columns.names, columns.encodings, columns.sizes, strict=True)
        ]
        head = 4 * columns.sizes.count(None)

        def decode(data: bytes, name: str, at: int) -> Sample:
            if len(data) < head:
                raise ShardError(f"{name}: a sample of {len(data)} bytes holds no {head // 4} sizes")
            lengths = iter(np.frombuffer(data, "<u4", head // 4).tolist())
            at, sample = head, {}
            for column, size, decoder in decoders:
                stop = at + (next(lengths) if size is None else size)
                if stop > len(data):
                    raise ShardError(
                        f"{name}: column {column!r} ends {stop - len(data)} bytes behind its sample"
                    )
                if decoder is not None:
                    try:
                        sample[column] = decoder(data[at:stop])
                    except (ValueError, ArithmeticError, RecursionError) as error:
                        raise ShardError(f"{name}: column {column!r}: {error}") from error
                at = stop
            if at != len(data):
                raise ShardError(f"{name}: a sample has {len(data) - at} bytes behind its last column")
            return sample

        return decode


def read_columns(file: ShardFile, offsets: Offsets) -> MdsColumns:
    """The shard's description of its columns."""
    start = 4 + 4 * len(offsets)
    nbytes = int(offsets[0]) - start
    if nbytes > _MAX_HEAD_NBYTES:
        raise ShardError(
            f"{file.name}: a description of {nbytes} bytes, more than {_MAX_HEAD_NBYTES}, is none"
        )
    try:
        head = json.loads(file.read_at(start, nbytes))
        names, encodings = (tuple(head[f"column_{what}"]) for what in ("names", "encodings"))
        sizes = tuple(head["column_sizes"])
        if head.get("version") != 2 or head.get("format") != "mds":
            raise ValueError(f"format {head.get('format')!r}, version {head.get('version')!r}")
        if not len(set(names)) == len(names) == len(encodings) == len(sizes):
            raise ValueError("names, encodings and sizes of columns differ in number")
        if not all(isinstance(text, str) for text in (*names, *encodings)):
            raise ValueError("names and encodings are texts")
        if not all(size is None or (type(size) is int and size > 0) for size in sizes):
            raise ValueError("sizes are whole numbers or null")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ShardError(f"{file.name}: not an MDS shard of version 2: {error}") from error
    return MdsColumns(names, encodings, sizes)


def _value_decoder(encoding: str, column: str, name: str) -> Decoder:
    kind, _, arguments = encoding.partition(":")
    if kind == "pkl":
        raise DataError(
            f"{name}: column {column!r} holds pickles, which run code when they are read; write the column as json "
            "or ndarray, or leave it out: Load(columns=[...])"
        )
    if kind == "ndarray":
        dtype, _, shape = arguments.partition(":")
        try:
            fixed = tuple(map(int, shape.split(","))) if shape else None
            known = SCALARS[dtype] if dtype else None
        except (ValueError, KeyError) as error:
            raise ShardError(f"{name}: column {column!r} has the odd encoding {encoding!r}") from error
        return lambda data: _array(data, known, fixed)
    if kind in SCALARS:
        return lambda data: _scalar(data, SCALARS[kind])
    found = _PLAIN.get(kind)
    if found is None:
        raise DataError(
            f"{name}: column {column!r} has the encoding {encoding!r}, which is not read here; leave it out with "
            "Load(columns=[...]), or write it as bytes, ndarray or json"
        )
    return found


def _scalar(data: bytes, dtype: np.dtype[Any]) -> Any:
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    return np.frombuffer(data, dtype)[0]


def _array(data: bytes, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> Any:
    """An array of its own: ``[dtype: 1] [dimensions * 4 + log2 of the bytes of a size: 1] [sizes] [values]``."""
    at = 0
    if dtype is None:
        number = data[0] if data else -1
        if number not in ARRAY_DTYPES:
            raise ValueError(f"an array says the dtype {number}")
        dtype, at = SCALARS[ARRAY_DTYPES[number]], 1
    if shape is None:
        if len(data) <= at:
            raise ValueError("an array without a shape")
        dims, width = data[at] >> 2, 1 << (data[at] & 3)
        if at + 1 + dims * width > len(data):
            raise ValueError("an array without a shape")
        shape = tuple(np.frombuffer(data, f"<u{width}", dims, at + 1).tolist())
        at += 1 + dims * width
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) - at:
        raise ValueError(f"{len(data) - at} bytes are no {dtype} array of shape {shape}")
    return np.frombuffer(data, dtype, count, at).reshape(shape).astype(dtype.newbyteorder("="))


_PLAIN: Final[dict[str, Decoder]] = {
    "str": bytes.decode,
    "int": lambda data: int(_scalar(data, SCALARS["int64"])),
    "json": lambda data: json.loads(data.decode()),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "pil": raw_image,
    **dict.fromkeys(("bytes", "jpeg", "png"), lambda data: data),
}
