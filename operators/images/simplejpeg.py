"""simplejpeg (libjpeg-turbo) as a region decoder: any DCT scale, no row below the region, no allocation.

The rows below the region are left out by declaring to the decoder that the image
ends there: the frame header's number of rows (ITU-T T.81, B.2.2) is overwritten
in a copy of the encoded bytes. Sixteen rows more than needed are decoded, so
that the chroma upsampling of the region's last row sees its true neighbours.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pipegraph.errors import extra_module
from pipegraph.operators.images.crop import Region
from pipegraph.operators.images.decoder import Buffer, ImageHWC, Scratch
from pipegraph.operators.images.header import Header
from pipegraph.operators.images.opencv import part_of

_MARGIN_ROWS = 16
_segment = struct.Struct(">BBH").unpack_from


def rows_at(data: Buffer) -> int:
    """Where a JPEG of one scan whose rows are decoded one after the other (baseline) states their number; else 0."""
    place, rows, channels = 2, 0, 0
    while place + 10 <= len(data):
        lead, marker, length = _segment(data, place)
        if lead != 0xFF or marker == 0xFF:  # garbage or fill bytes between segments
            return 0
        if marker == 0xDA:
            return rows if data[place + 4] == channels else 0
        if marker in (0xC0, 0xC1):
            rows, channels = place + 5, data[place + 9]
        place += 2 + length
    return 0


class SimplejpegRegions:
    """See ``RegionDecoder``. JPEG only."""

    name = "simplejpeg"

    def __init__(self) -> None:
        simplejpeg = extra_module("simplejpeg", "images", "backend='simplejpeg'")
        self._decode_jpeg: Any = simplejpeg.decode_jpeg
        self._encoded = Scratch()
        self._pixels = Scratch()

    def decode(
        self, data: Buffer, header: Header, region: Region, factor: int, channels: int
    ) -> ImageHWC | None:
        height = header.height
        last = region.top + region.height + _MARGIN_ROWS
        if last < height and (place := rows_at(data)):
            height = last
            copy = self._encoded.take(len(data))[: len(data)]
            copy[:] = np.frombuffer(data, np.uint8)
            data = copy.data
            struct.pack_into(">H", data, place, height)
        rows, columns = -(-height // factor), -(-header.width // factor)
        try:
            whole = self._decode_jpeg(
                data,
                "RGB" if channels == 3 else "GRAY",
                min_height=rows,
                min_width=columns,
                buffer=self._pixels.take(rows * columns * channels),
                strict=False,  # the rows that were left out are "extraneous bytes"
            )
        except ValueError:
            return None
        return part_of(whole, region, factor, rows, columns)
