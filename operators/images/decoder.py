"""The interfaces of decoding backends, and memory that they reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipegraph import concurrency
from pipegraph.errors import GraphError
from pipegraph.operators.images.crop import CropWindow, Region
from pipegraph.operators.images.header import Header

Interpolation = Literal["nearest", "linear", "cubic", "area", "antialias"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("nearest", "linear", "cubic", "area", "antialias")

Buffer = bytes | bytearray | memoryview
ImageHWC = npt.NDArray[np.uint8]


class Row(NamedTuple):
    """One image to decode: its bytes, its header as ``probe`` has read it, and the window that is to fill ``out``.

    ``out`` is uint8 (height, width, channels), each row contiguous; 3 channels for RGB, 1 for greyscale.
    """

    data: Buffer
    header: Header
    window: CropWindow
    out: ImageHWC


class ImageBackend(ABC):
    """Decodes regions of images into memory that the caller owns; thread-safe."""

    name: str

    @abstractmethod
    def decode_rows(self, rows: Sequence[Row], interpolation: Interpolation) -> list[Exception | None]:
        """Decode the windows of images of equally many channels: every byte of each ``out`` is written.

        Args:
            interpolation: shrinking, ``"nearest"`` skips pixels; ``"area"`` averages them; ``"linear"`` and ``"cubic"``
                are widened by the scale in Pillow, and in the other backends average whole blocks first where the scale
                is two or more (three in one direction alone). ``"antialias"`` is Pillow's linear filter at full scale,
                on all backends.

        Returns:
            of each row its error, or None: DecodeError for an image that is truncated, broken, or of a kind that is not
            decoded. What its ``out`` then holds is undefined.
        """

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        """Decode one row, or raise its error."""
        (error,) = self.decode_rows([Row(data, header, window, out)], interpolation)
        if error is not None:
            raise error


class Wanted(NamedTuple):
    """A region (stored rows and columns, inside the image) of a plain, complete image, to be shrunk by ``factor``.

    The factor is 1 for all but JPEGs.
    """

    data: Buffer
    header: Header
    region: Region
    factor: int


class RegionDecoder(Protocol):
    """Decodes regions; safe on any number of threads."""

    name: str

    def decode(self, wanted: Sequence[Wanted], channels: int) -> Iterator[ImageHWC | None]:
        """The pixels of each region.

        Returns:
            uint8 (rows, columns) or (rows, columns, channels), valid until the next is taken; None where the decoder
            cannot do it.
        """
        ...


def check_interpolation(interpolation: str) -> None:
    """Raises GraphError for anything but one of ``INTERPOLATIONS``."""
    if interpolation not in INTERPOLATIONS:
        raise GraphError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {interpolation!r}")


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
