"""The orientation in EXIF and XMP blocks, read as Pillow reads it."""

from __future__ import annotations

import re
import struct
from contextlib import suppress

_TAG = 0x0112
_SIZES = {1: "B", 3: "H", 4: "I"}
_XMP = re.compile(rb'tiff:Orientation(="|>)([0-9])')


def orientation(exif_block: bytes, xmp: bytes) -> int:
    """The EXIF orientation 1 to 8; XMP's where EXIF has none; 1 where neither says one of these.

    Args:
        exif_block: a TIFF structure, with or without the leading ``Exif\\0\\0``.
        xmp: an XMP packet.
    """
    value = None
    with suppress(struct.error):  # a broken block counts as none
        value = _tag(exif_block.removeprefix(b"Exif\0\0"))
    if value is None and xmp and (match := _XMP.search(xmp)):
        value = int(match[2])
    return value if value is not None and 1 <= value <= 8 else 1


def _tag(block: bytes) -> int | None:
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return None
    (directory,) = struct.unpack_from(order + "I", block, 4)
    (entries,) = struct.unpack_from(order + "H", block, directory)
    for i in range(entries):
        place = directory + 2 + 12 * i
        tag, kind, count = struct.unpack_from(order + "HHI", block, place)
        if tag == _TAG:
            if kind not in _SIZES or count != 1:
                return None
            (value,) = struct.unpack_from(order + _SIZES[kind], block, place + 8)
            return int(value)
    return None
