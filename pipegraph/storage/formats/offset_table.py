"""The table of offsets at the beginning of an MDS shard, and how its images of Pillow's are stored.

The table is a uint32 count and the uint32 offsets of the samples and of their end, little-endian, counted from the
start of the file. An image is the uint32 width, height and length of its mode, the mode, and the pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pipegraph.encoded_rows import Decode
from pipegraph.errors import ShardError
from pipegraph.storage.shard_files import ShardFile

from .shard_format import Block, PlacedRows

Offsets = npt.NDArray[np.int64]


def read_offsets(file: ShardFile) -> Offsets:
    """The offset of each sample and of the end, int64 (samples + 1,)."""
    if file.size < 8:
        raise ShardError(f"{file.name}: {file.size} bytes hold no table of samples")
    count = int.from_bytes(file.read_at(0, 4), "little")
    end = table_nbytes(count)
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


def table_nbytes(count: int) -> int:
    """The bytes before what follows the table."""
    return 4 + 4 * (count + 1)


def blocks_of(offsets: Offsets, block_nbytes: int) -> Iterator[Block]:
    """Runs of whole samples of about ``block_nbytes``."""
    first, count = 0, len(offsets) - 1
    while first < count:
        fitting = int(np.searchsorted(offsets, offsets[first] + block_nbytes, "right")) - 1
        stop = min(max(fitting, first + 1), count)
        start = int(offsets[first])
        yield Block(start, int(offsets[stop]) - start, first, stop - first)
        first = stop


def table_rows(file: ShardFile, offsets: Offsets, block: Block, decode: Decode) -> PlacedRows:
    """The samples of one block."""
    found = offsets[block.first : block.first + block.samples + 1]
    if len(found) <= block.samples or (block.offset, block.offset + block.nbytes) != (found[0], found[-1]):
        raise ShardError(
            f"{file.name}: the block at byte {block.offset} is not where the shard has these samples; make the "
            "index anew"
        )
    return PlacedRows(file, block.offset, (found - block.offset).tolist(), decode)


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
