"""Pillow's images as MDS and LitData store them: uint32 width, height and length of the mode, the mode, the pixels."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

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
