"""OpenCV as a region decoder: whole images, JPEGs also at a reduced DCT scale."""

from __future__ import annotations

import numpy as np

from pipegraph.operators.images.crop import Region
from pipegraph.operators.images.decoder import Buffer, ImageHWC
from pipegraph.operators.images.header import Header
from pipegraph.operators.images.scaling import opencv, part_of


class OpencvRegions:
    """See ``RegionDecoder``. Decodes every plain format."""

    name = "opencv"

    def __init__(self) -> None:
        cv2 = opencv()
        reduced = {1: 0} | {n: getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{n}") for n in (2, 4, 8)}
        # The orientation is applied by the caller: OpenCV would apply it a second time.
        self._flags = {
            (channels, factor): kind | flag | cv2.IMREAD_IGNORE_ORIENTATION
            for channels, kind in ((1, cv2.IMREAD_GRAYSCALE), (3, cv2.IMREAD_COLOR_RGB))
            for factor, flag in reduced.items()
        }

    def decode(
        self, data: Buffer, header: Header, region: Region, factor: int, channels: int
    ) -> ImageHWC | None:
        cv2 = opencv()
        try:
            whole = cv2.imdecode(np.frombuffer(data, np.uint8), self._flags[channels, factor])
        except cv2.error:
            return None
        return part_of(whole, region, factor, -(-header.height // factor), -(-header.width // factor))
