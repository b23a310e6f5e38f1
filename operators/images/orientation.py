"""EXIF orientations: read from EXIF and XMP blocks as Pillow reads them, and where a region of the oriented image lies.

Orientation values are those of the EXIF tag 0x0112 (CIPA DC-008, "Orientation"):
1 as stored, 2 mirrored left-right, 3 turned by 180 degrees, 4 mirrored
top-bottom, 5 transposed, 6 to be turned clockwise by 90 degrees, 7 transposed
along the other diagonal, 8 to be turned counter-clockwise.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from pipegraph.operators.images.crop import Region

# (rows and columns swapped, then rows reversed, then columns reversed):
# oriented = stored, transposed if the first, then reversed as the others say.
STEPS: dict[int, tuple[bool, bool, bool]] = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def swaps_sides(orientation: int) -> bool:
    """Whether height and width change places between the stored and the oriented image."""
    return STEPS[orientation][0]


def stored_region(region: Region, orientation: int, height: int, width: int) -> Region:
    """Where ``region`` of the oriented image, of ``height`` x ``width``, lies in the stored one."""
    swap, rows_reversed, columns_reversed = STEPS[orientation]
    top, left, h, w = region
    if rows_reversed:
        top = height - top - h
    if columns_reversed:
        left = width - left - w
    return Region(left, top, w, h) if swap else Region(top, left, h, w)


def oriented(image_HWC: npt.NDArray[Any], orientation: int, flip: bool = False) -> npt.NDArray[Any]:
    """A view of ``image_HWC`` (stored rows and columns) as it is to be seen, then mirrored if ``flip``."""
    swap, rows_reversed, columns_reversed = STEPS[orientation]
    view = np.swapaxes(image_HWC, 0, 1) if swap else image_HWC
    rows = slice(None, None, -1) if rows_reversed else slice(None)
    columns = slice(None, None, -1) if columns_reversed != flip else slice(None)
    return view[rows, columns]


_TAG = 0x0112
_XMP = re.compile(rb'tiff:Orientation(="|>)([0-9])')
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_UNITS = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8)
"""Bytes of one value of TIFF's types, which begin at 1."""


def _plain(block: bytes) -> int | None:
    """The orientation that a plain EXIF block states, None where it states none; 0 where that is Pillow's to say.

    Plain is a first directory that is whole, as are all its values, and in which the tag is as it should be, and the
    same if it stands there twice. The rest is left to Pillow, whose import would be a large part of the time to a
    first batch.
    """
    order = _ORDERS.get(block[:4])
    if order is None or len(block) < 8:
        return 0
    (start,) = struct.unpack_from(order + "L", block, 4)
    entries = start + 2
    count = int.from_bytes(block[start:entries], "little" if order == "<" else "big")
    end = entries + 12 * count
    if end + 4 > len(block):  # the next directory's place comes last
        return 0
    found, total = None, 0
    for tag, kind, values, word in struct.iter_unpack(order + "HHLL", block[entries:end]):
        if not 1 <= kind < len(_UNITS):
            return 0
        size = values * _UNITS[kind]
        if size > 4:  # they stand elsewhere, at `word`
            total += size
            if max(word + size, total) > len(block):
                return 0
        if tag == _TAG:
            value = word & 0xFFFF if order == "<" else word >> 16
            if (kind, values) != (3, 1) or not 1 <= value <= 8 or found not in (None, value):
                return 0
            found = value
    return found


def orientation_of(exif_block: bytes, xmp: bytes) -> int:
    """The EXIF orientation 1 to 8; XMP's where EXIF has none; 1 where neither says one of these."""
    value = _plain(exif_block) if exif_block else None
    if value == 0:
        from PIL.Image import Exif

        exif, value = Exif(), None
        with suppress(Exception):  # a broken block counts as none
            exif.load(exif_block)
            value = exif.get(_TAG)
    if value is None and xmp and (match := _XMP.search(xmp)):
        value = int(match[2])
    return value if isinstance(value, int) and 1 <= value <= 8 else 1
