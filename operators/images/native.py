"""The compiled decoder of rows (``rows.c``): JPEGs with the pixels of the OpenCV family, any number in one call.

The call reads the files, draws what is cut out, and holds no interpreter's lock. It is there where the package was
built with a compiler, and Pillow's libjpeg is libjpeg-turbo; without it each image is decoded by itself. It leaves what
is unusual or broken to the other backends.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipegraph.errors import MissingExtraError
from pipegraph.operators.images.crop import CenterCrop, Crop, RandomResizedCrop
from pipegraph.operators.images.header import pillow
from pipegraph.paths import PATHS

_TARGET = struct.Struct("10q7d")

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
        decode = ctypes.CDLL(str(file)).pipegraph_read_rows
    except (MissingExtraError, OSError, AttributeError):
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    decode.argtypes = [pointer, ctypes.c_char_p, number, pointer, ctypes.c_char_p, pointer, number, pointer]
    decode.restype = None
    return decode, (ctypes.c_void_p * len(found))(*found)


class NativeRows:
    """Reads, cuts and decodes rows of one size and type.

    Args:
        shape: of the output: (height, width, channels).
        planes: whether the channels of the output are planes, one after the other.
        table: what to write for each channel and level; None for the level itself, a uint8.
        crop, flip: what is cut out, and the probability of mirroring it.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        planes: bool,
        table: npt.NDArray[Any] | None,
        crop: Crop,
        flip: float,
    ) -> None:
        height, width, channels = shape
        steps = (width, 1, height * width) if planes else (width * channels, channels, 1)
        entry = (1, 0) if table is None else (table.itemsize, table.ctypes.data)
        self._table = table
        chosen, numbers = (0, 0), [0.0] * 6
        if isinstance(crop, RandomResizedCrop):
            chosen, numbers = (1, 0), [*crop.scale, *crop.ratio, *map(math.log, crop.ratio)]
        elif isinstance(crop, CenterCrop):
            chosen = 2, crop.resize
        self._target = _TARGET.pack(*shape, entry[0], *steps, entry[1], *chosen, *numbers, flip)

    def decode(
        self, encoded: Sequence[Any], files: bool, digests: Sequence[bytes], out: npt.NDArray[Any]
    ) -> Sequence[int]:
        """For each row whether it was written to its place in ``out``; the places of the others are undefined.

        Args:
            encoded: bytes, or with ``files`` paths.
            digests: the key of each row's generator.
        """
        functions = _functions()
        if functions is None:
            return [0] * len(encoded)
        function, libjpeg = functions
        if files:
            encoded = [_path(each) for each in encoded]
        places = array("q")
        for each in encoded:
            try:
                view = np.frombuffer(each, np.uint8)
            except (TypeError, ValueError, BufferError):  # others say what is wrong with it
                places.extend((0, 0))
            else:
                places.extend((view.__array_interface__["data"][0], -view.size if files else view.size))
        done = bytearray(len(encoded))
        function(
            libjpeg,
            self._target,
            len(encoded),
            places.buffer_info()[0],
            b"".join(digests),
            out.ctypes.data,
            out.strides[0],
            (ctypes.c_char * len(done)).from_buffer(done),
        )
        return done


def _path(given: Any) -> bytes:
    """As the system takes it; empty where it cannot, which others say."""
    if not isinstance(given, PATHS):
        return b""
    path = os.fsencode(given)
    return b"" if b"\0" in path else path
