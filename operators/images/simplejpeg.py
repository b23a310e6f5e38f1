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


class SimplejpegRegions:
    """See ``RegionDecoder``. JPEG only."""

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
        if header.rows_at and last < height:
            height = last
            copy = self._encoded.take(len(data))[: len(data)]
            copy[:] = np.frombuffer(data, np.uint8)
            data = copy.data
            struct.pack_into(">H", data, header.rows_at, height)
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
