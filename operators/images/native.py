"""The compiled decoder of rows (``rows.c``): JPEGs with the pixels of the OpenCV family, any number in one call.

The call holds no interpreter's lock. It is there where the package was built with a compiler, and Pillow's libjpeg is
libjpeg-turbo; without it each image is decoded by itself. It leaves what is unusual or broken to the other backends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipegraph.errors import MissingExtraError
from pipegraph.operators.images.crop import CropWindow
from pipegraph.operators.images.header import Header, pillow
from pipegraph.operators.images.opencv import reduction
from pipegraph.operators.images.orientation import STEPS, stored_region

_FUNCTIONS = """
    jpeg_std_error jpeg_CreateDecompress jpeg_mem_src jpeg_read_header jpeg_start_decompress jpeg_crop_scanline
    jpeg_skip_scanlines jpeg_read_scanlines jpeg_abort_decompress jpeg_destroy_decompress
"""


@cache
def library() -> Path | None:
    """The compiled file; it calls nothing of Python's, and so is that of all versions. None where there is none."""
    return next(Path(__file__).parent.glob("_rows*.so"), None)


@cache
def _functions() -> tuple[Any, Any] | None:
    """The compiled function, and those of libjpeg that it takes."""
    file = library()
    if file is None:
        return None
    try:
        libjpeg_of = pillow("decoding images").core.__file__
        libjpeg = ctypes.CDLL(libjpeg_of)  # a name is looked up in the libraries that it has loaded, too
        found = [ctypes.cast(getattr(libjpeg, name), ctypes.c_void_p) for name in _FUNCTIONS.split()]
        decode = ctypes.CDLL(str(file)).pipegraph_decode_rows
    except (MissingExtraError, OSError, AttributeError):
        return None
    decode.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 3]
    decode.restype = None
    return decode, (ctypes.c_void_p * len(found))(*found)


class NativeRows:
    """Decodes rows of one size and type.

    Args:
        shape: of the output: (height, width, channels).
        planes: whether the channels of the output are planes, one after the other.
        table: what to write for each channel and level; None for the level itself, a uint8.
    """

    def __init__(self, shape: tuple[int, int, int], planes: bool, table: npt.NDArray[Any] | None) -> None:
        height, width, channels = shape
        steps = (width, 1, height * width) if planes else (width * channels, channels, 1)
        self._size, self._table = (height, width), table
        entry = (1, 0) if table is None else (table.itemsize, table.ctypes.data)
        self._target = np.array([*shape, entry[0], *steps, entry[1]], np.int64)

    def decode(
        self,
        encoded: Sequence[Any],
        parts: Sequence[tuple[Header, CropWindow] | Exception],
        out: npt.NDArray[Any],
    ) -> Sequence[int]:
        """For each row whether it was written to its place in ``out``; the places of the others are undefined."""
        functions = _functions()
        if functions is None:
            return [0] * len(encoded)
        function, libjpeg = functions
        places, jobs = [], []
        first, step = out.ctypes.data, out.strides[0]
        for place, (data, part) in enumerate(zip(encoded, parts, strict=True)):
            if isinstance(part, Exception) or not (isinstance(data, bytes) or memoryview(data).c_contiguous):
                continue
            header, window = part
            if header.format != "JPEG" or not (header.plain and header.complete):
                continue
            region = stored_region(window.region, header.orientation, *header.size)
            swap, up, left = STEPS[header.orientation]
            factor = reduction(region, *(self._size[::-1] if swap else self._size))
            turn = swap + 2 * up + 4 * (left != window.flip)
            start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
            jobs.append(
                (start, len(data), header.height, header.width, *region, factor, turn, first + place * step)
            )
            places.append(place)
        made = np.zeros(len(encoded), np.uint8)
        done = np.empty(len(jobs), np.uint8)
        rows = np.array(jobs, np.int64)
        function(libjpeg, len(jobs), rows.ctypes.data, self._target.ctypes.data, done.ctypes.data)
        made[places] = done
        written: list[int] = made.tolist()
        return written
