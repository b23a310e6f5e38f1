"""Region decoders, and the backend made of them.

A region decoder gives the pixels of one region at a whole scale. All of them
stand on libjpeg-turbo with the accurate DCT and fancy upsampling, and so give
the same bytes; they differ in how much of the image they must decode for that.
Whichever is chosen, by hand or by calibration, what is delivered does not change.
"""

from __future__ import annotations

from typing import Protocol

from pipegraph.operators.images.crop import CropWindow, Region
from pipegraph.operators.images.decoder import Buffer, ImageHWC, Interpolation
from pipegraph.operators.images.header import Header
from pipegraph.operators.images.opencv import reduction, resize_into
from pipegraph.operators.images.orientation import stored_region, swaps_sides
from pipegraph.operators.images.pillow import PillowBackend, antialias_into


class RegionDecoder(Protocol):
    """Decodes one region of a plain, complete image; safe on any number of threads."""

    name: str

    def decode(
        self, data: Buffer, header: Header, region: Region, factor: int, channels: int
    ) -> ImageHWC | None:
        """The pixels of ``region`` (stored rows and columns, inside the image), shrunk by ``factor``, of a JPEG if
        above 1.

        Returns:
            uint8 (rows, columns) or (rows, columns, channels), valid until this thread's next call; None where the
            decoder cannot do it.
        """
        ...


class RegionBackend:
    """A backend that decodes no more than it must; Pillow decodes what is unusual or broken.

    ``exact`` and ``reduced`` decode regions of JPEGs, at full scale and at 1/2, 1/4 and 1/8; ``other`` those of other
    formats.
    """

    def __init__(self, name: str, exact: RegionDecoder, reduced: RegionDecoder, other: RegionDecoder) -> None:
        self.name, self._exact, self._reduced, self._other = name, exact, reduced, other
        self._pillow = PillowBackend()

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        pixels = None
        if header.plain and header.complete:
            region = stored_region(window.region, header.orientation, *header.size)
            height, width = out.shape[1::-1] if swaps_sides(header.orientation) else out.shape[:2]
            if header.format == "JPEG":
                whole = interpolation in ("nearest", "antialias")
                factor = 1 if whole else reduction(region, height, width)
                decoder = self._exact if factor == 1 else self._reduced
            else:
                factor, decoder = 1, self._other
            pixels = decoder.decode(data, header, region, factor, out.shape[2])
            if pixels is None and decoder is not self._other:
                pixels = self._other.decode(data, header, region, factor, out.shape[2])
        if pixels is None:
            self._pillow.decode_into(data, header, window, out, interpolation=interpolation)
        elif interpolation == "antialias":
            antialias_into(pixels, out, header.orientation, window)
        else:
            resize_into(pixels, out, header.orientation, window.flip, interpolation)
