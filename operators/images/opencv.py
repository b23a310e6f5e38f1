"""OpenCV: whole images, JPEGs at a reduced DCT scale where the region is much larger than the output.

The scale is 1/2, 1/4 or 1/8, the smallest that leaves the region no smaller
than the output; what remains, a factor below two, is scaled with
``cv2.INTER_LINEAR``, which sees every pixel at such factors. Shrinking further
(long thin regions) uses ``cv2.INTER_AREA``. The EXIF orientation is applied
here and not by OpenCV. No setting of OpenCV is touched: how many threads it
uses inside one call stays the user's choice (one image's resize is so small
that it makes no difference: 86 us with one thread and with two).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pipegraph.errors import MissingExtraError
from pipegraph.operators.images.backend import Buffer, ImageHWC, Interpolation
from pipegraph.operators.images.crop import Cut, Region
from pipegraph.operators.images.header import Header
from pipegraph.operators.images.orientation import oriented, stored_region, swaps_sides
from pipegraph.operators.images.pillow import PillowBackend

# OpenCV prints notices about PNGs that end early: those go to Pillow at once.
_PNG_END = b"IEND\xaeB`\x82"


@cache
def _cv2() -> Any:
    try:
        import cv2
    except ImportError as error:
        raise MissingExtraError("opencv-python-headless", "images", "backend='opencv'") from error
    return cv2


def reduction(region: Region, height: int, width: int) -> int:
    """The largest of 1, 2, 4 and 8 by which ``region`` can shrink and still cover height x width."""
    for factor in (8, 4, 2):
        if region.height >= factor * height and region.width >= factor * width:
            return factor
    return 1


def reduced_region(region: Region, factor: int, height: int, width: int) -> Region:
    """``region`` in the image shrunk by ``factor`` to height x width, to the nearest pixel, never empty."""
    if factor == 1:
        return region
    top = min(height - 1, round(region.top / factor))
    left = min(width - 1, round(region.left / factor))
    bottom = min(height, round((region.top + region.height) / factor))
    right = min(width, round((region.left + region.width) / factor))
    return Region(top, left, max(1, bottom - top), max(1, right - left))


def resize_into(
    pixels: ImageHWC, out: ImageHWC, orientation: int, flip: bool, interpolation: Interpolation
) -> None:
    """Scale ``pixels`` (stored rows and columns) to fill ``out``, turned by ``orientation`` and ``flip``."""
    cv2 = _cv2()
    height, width = out.shape[1::-1] if swaps_sides(orientation) else out.shape[:2]
    method = {
        "nearest": cv2.INTER_NEAREST,
        "linear": cv2.INTER_LINEAR,
        "cubic": cv2.INTER_CUBIC,
        "area": cv2.INTER_AREA,
    }[interpolation]
    if interpolation != "nearest" and (pixels.shape[0] > 2 * height or pixels.shape[1] > 2 * width):
        method = cv2.INTER_AREA
    if orientation == 1 and out.flags.c_contiguous:
        cv2.resize(pixels, (width, height), dst=out, interpolation=method)
        if flip:
            cv2.flip(out, 1, dst=out)
        return
    scaled = cv2.resize(pixels, (width, height), interpolation=method)
    np.copyto(out, oriented(scaled.reshape(height, width, out.shape[2]), orientation, flip))


class OpencvBackend:
    """See the module."""

    name = "opencv"

    def __init__(self) -> None:
        cv2 = _cv2()
        self._pillow = PillowBackend()
        reduced = {
            1: 0,
            2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
            4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
            8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
        }
        # Without IMREAD_IGNORE_ORIENTATION the EXIF orientation would be applied twice.
        self._flags = {
            (channels, factor): kind | flag | cv2.IMREAD_IGNORE_ORIENTATION
            for channels, kind in ((1, cv2.IMREAD_GRAYSCALE), (3, cv2.IMREAD_COLOR_RGB))
            for factor, flag in reduced.items()
        }

    def decode_into(
        self,
        data: Buffer,
        header: Header,
        cut: Cut,
        out: ImageHWC,
        *,
        interpolation: Interpolation = "linear",
    ) -> None:
        """See ``Backend.decode_into``."""
        pixels = self._decode(data, header, cut, out) if header.plain else None
        if pixels is None:  # unusual or broken: Pillow decodes it, or says what is wrong with it
            self._pillow.decode_into(data, header, cut, out, interpolation=interpolation)
        else:
            resize_into(pixels, out, header.orientation, cut.flip, interpolation)

    def _decode(self, data: Buffer, header: Header, cut: Cut, out: ImageHWC) -> ImageHWC | None:
        """The region in stored rows and columns, possibly reduced; ``None`` if OpenCV gives nothing."""
        if header.format == "PNG" and bytes(data[-len(_PNG_END) :]) != _PNG_END:
            return None
        height, width = header.size
        region = stored_region(cut.region, header.orientation, height, width)
        target_h, target_w = out.shape[1::-1] if swaps_sides(header.orientation) else out.shape[:2]
        factor = reduction(region, target_h, target_w) if header.format == "JPEG" else 1
        cv2 = _cv2()
        try:
            whole = cv2.imdecode(np.frombuffer(data, np.uint8), self._flags[out.shape[2], factor])
        except cv2.error:
            return None
        if whole is None:
            return None
        expected = -(-header.height // factor), -(-header.width // factor)
        if whole.shape[:2] != expected:  # the header was misread: let the reference decide
            return None
        top, left, h, w = reduced_region(region, factor, *expected)
        pixels: ImageHWC = whole[top : top + h, left : left + w]
        return pixels
