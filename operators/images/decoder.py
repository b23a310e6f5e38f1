"""The interface of decoding backends, and memory that they reuse."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipegraph import concurrency
from pipegraph.operators.images.crop import CropWindow
from pipegraph.operators.images.header import Header

Interpolation = Literal["nearest", "linear", "cubic", "area", "antialias"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("nearest", "linear", "cubic", "area", "antialias")

Buffer = bytes | bytearray | memoryview
ImageHWC = npt.NDArray[np.uint8]


class ImageBackend(Protocol):
    """Decodes one region of one image into memory that the caller owns; thread-safe."""

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        """Decode ``window`` of the image, whose header ``probe`` has read, and scale it to fill ``out``.

        Args:
            out: uint8 (height, width, channels), each row contiguous; 3 channels for RGB, 1 for greyscale. Every byte
                is written, or an error is raised and the content is undefined.
            interpolation: shrinking, ``"nearest"`` skips pixels; ``"area"`` averages them; ``"linear"`` and ``"cubic"``
                are widened by the scale in Pillow, and in the other backends average whole blocks first where the scale
                is two or more (three in one direction alone). ``"antialias"`` is Pillow's linear filter at full scale,
                on all backends.

        Raises:
            DecodeError: the image is truncated, broken, or of a kind that is not decoded.
        """
        ...


KEPT_NBYTES = 64 * 2**20
"""The most that one thread keeps: a 24 megapixel image at half its size. Larger wishes are met, not kept."""


class Scratch(concurrency.local):
    """One growing block of bytes per thread.

    A fresh block for every image costs a page fault per 4 KiB: for 3000x2000
    pixels as much time as decoding them.
    """

    def __init__(self) -> None:
        self._block: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """At least ``nbytes`` bytes of any content, valid until this thread takes again."""
        if nbytes > KEPT_NBYTES:
            return np.empty(nbytes, np.uint8)
        if self._block.nbytes < nbytes:
            self._block = np.empty(nbytes + nbytes // 4, np.uint8)
        return self._block
