"""Region decoders, and the backend made of them.

A region decoder gives the pixels of one region at a whole scale. All of them
stand on libjpeg-turbo with the accurate DCT and fancy upsampling, and so give
the same bytes; they differ in how much of the image they must decode for that.
Whichever is chosen, what is delivered does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    Args:
        decoders: of regions of JPEGs; each does what those before it cannot. The last one decodes other formats too.
    """

    def __init__(self, name: str, decoders: Sequence[RegionDecoder]) -> None:
        self.name, self._decoders = name, decoders
        self._pillow = PillowBackend()

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        pixels = None
        if header.plain and header.complete:
            region = stored_region(window.region, header.orientation, *header.size)
            height, width = out.shape[1::-1] if swaps_sides(header.orientation) else out.shape[:2]
            jpeg = header.format == "JPEG"
            whole = not jpeg or interpolation in ("nearest", "antialias")
            factor = 1 if whole else reduction(region, height, width)
            for decoder in self._decoders if jpeg else self._decoders[-1:]:
                pixels = decoder.decode(data, header, region, factor, out.shape[2])
                if pixels is not None:
                    break
        if pixels is None:
            self._pillow.decode_into(data, header, window, out, interpolation=interpolation)
        elif interpolation == "antialias":
            antialias_into(pixels, out, header.orientation, window)
        else:
            resize_into(pixels, out, header.orientation, window.flip, interpolation)
