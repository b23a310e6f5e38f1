"""The interface of decoding backends."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipegraph.errors import GraphError
from pipegraph.operators.images.crop import CropWindow
from pipegraph.operators.images.header import Header

Interpolation = Literal["nearest", "linear", "cubic", "area", "antialias"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("nearest", "linear", "cubic", "area", "antialias")

Buffer = bytes | bytearray | memoryview
ImageHWC = npt.NDArray[np.uint8]


class ImageBackend(Protocol):
    """Decodes one region of one image into memory that the caller owns.

    One backend object serves any number of threads at once: what a thread
    needs again (scratch memory, decoder handles) is kept per thread.
    """

    name: str

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        """Decode ``window`` of the image and scale it to fill ``out``.

        Args:
            data: the encoded image.
            header: what ``probe(data)`` said.
            window: region of the oriented image, inside it, and whether to mirror it.
            out: uint8 (height, width, channels), each row contiguous; 3 channels
                for RGB, 1 for greyscale. Every byte is written, or an error is raised
                and the content is undefined.
            interpolation: how pixels are scaled. Shrinking: ``"nearest"`` skips pixels;
                ``"area"`` averages them; ``"linear"`` and ``"cubic"`` are widened by the
                scale in Pillow, and in the other backends average whole blocks first
                where the scale is two or more (three in one direction alone). ``"antialias"``
                is Pillow's linear filter on the pixels at full scale, and of all backends the same.

        Raises:
            DecodeError: the image is truncated, broken, or of a kind that is not decoded.
        """
        ...


def check_interpolation(interpolation: str) -> None:
    """Raises:
    GraphError: it is not one of ``INTERPOLATIONS``.
    """
    if interpolation not in INTERPOLATIONS:
        raise GraphError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {interpolation!r}")
