"""OpenCV, simplejpeg and nvImageCodec decode regions, OpenCV resizes them; by which factor to decode.

Shrinking is antialiased in two steps: by a whole factor that averages blocks
(JPEGs: in the DCT, while decoding), then by less than three with
``cv2.INTER_LINEAR``. ``cv2.INTER_AREA`` in one step gives nearly the same and
costs seven times as much (photographs to 224: 615 us instead of 87).

simplejpeg (libjpeg-turbo) decodes no row below the region: the decoder is told that the image ends there, by another
number of rows in the frame header (ITU-T T.81, B.2.2) of a copy of the encoded bytes. Sixteen rows more than needed are
decoded, so that the chroma upsampling of the region's last row sees its true neighbours.

nvImageCodec on the CPU makes the inverse DCT and the colours of the region only, of JPEGs at full scale: it offers no
reduced one. Each thread has a decoder of its own that decodes on that thread, and one image whose memory is used again.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pipegraph import concurrency
from pipegraph.errors import extra_module
from pipegraph.operators.images.crop import Region, oriented, swaps_sides
from pipegraph.operators.images.header import Buffer, Header, ImageHWC, Interpolation


@cache
def opencv() -> Any:
    """The module ``cv2``. None of its settings is touched: the threads of one call stay the user's choice."""
    return extra_module("cv2", "images", "this DecodeImage backend", "opencv-python-headless")


def reduction(region: Region, height: int, width: int) -> int:
    """The largest of 1, 2, 4 and 8 by which ``region`` can shrink and still cover height x width."""
    for factor in (8, 4, 2):
        if region.height >= factor * height and region.width >= factor * width:
            return factor
    return 1


def reduced_region(region: Region, factor: int, height: int, width: int) -> Region:
    """``region`` in the image shrunk by ``factor`` to height x width: to the nearest pixel, never empty."""
    if factor == 1:
        return region
    top = min(height - 1, round(region.top / factor))
    left = min(width - 1, round(region.left / factor))
    bottom = min(height, round((region.top + region.height) / factor))
    right = min(width, round((region.left + region.width) / factor))
    return Region(top, left, max(1, bottom - top), max(1, right - left))


def part_of(whole: ImageHWC | None, region: Region, factor: int, height: int, width: int) -> ImageHWC | None:
    """``region`` of an image that was decoded at 1/``factor``; None where that is not of height x width."""
    if whole is None or whole.shape[:2] != (height, width):
        return None
    top, left, h, w = reduced_region(region, factor, height, width)
    return whole[top : top + h, left : left + w]


def block_factors(height: int, width: int, out_height: int, out_width: int) -> tuple[int, int]:
    """How many rows and columns to average before the linear step; (1, 1) for none.

    Linear interpolation alone still serves factors below three in one direction.
    """
    rows, columns = max(1, height // out_height), max(1, width // out_width)
    return (rows, columns) if max(rows, columns) >= 3 or min(rows, columns) >= 2 else (1, 1)


def resize_into(
    pixels: ImageHWC, out: ImageHWC, orientation: int, flip: bool, interpolation: Interpolation
) -> None:
    """Scale ``pixels`` (stored rows and columns) to fill ``out``, turned by ``orientation`` and ``flip``."""
    cv2 = opencv()
    height, width = out.shape[1::-1] if swaps_sides(orientation) else out.shape[:2]
    method = getattr(cv2, f"INTER_{interpolation.upper()}")
    if interpolation in ("linear", "cubic"):
        rows, columns = block_factors(pixels.shape[0], pixels.shape[1], height, width)
        if (rows, columns) != (1, 1):
            # Whole blocks only: OpenCV's fast path. What is cut off is less than one output pixel.
            h, w = pixels.shape[0] // rows, pixels.shape[1] // columns
            top, left = (pixels.shape[0] - h * rows) // 2, (pixels.shape[1] - w * columns) // 2
            whole = pixels[top : top + h * rows, left : left + w * columns]
            pixels = cv2.resize(whole, (w, h), interpolation=cv2.INTER_AREA)
    if orientation == 1 and out.flags.c_contiguous:
        cv2.resize(pixels, (width, height), dst=out, interpolation=method)
        if flip:
            cv2.flip(out, 1, dst=out)
        return
    scaled = cv2.resize(pixels, (width, height), interpolation=method)
    np.copyto(out, oriented(scaled.reshape(height, width, out.shape[2]), orientation, flip))


class OpencvRegions:
    """See ``RegionDecoder``. Decodes every plain format."""

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


def nvimgcodec_module(purpose: str = "backend='nvimgcodec'") -> Any:
    """The module ``nvidia.nvimgcodec``, which tells on standard error which GPU libraries it lacks."""
    return extra_module("nvidia.nvimgcodec", "nvimgcodec", purpose, "nvidia-nvimgcodec-cu13")


def cpu_decoder(nvimgcodec: Any) -> Any:
    """A decoder that decodes on the calling thread."""
    return nvimgcodec.Decoder(
        device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        max_num_cpu_threads=1,
    )


def parameters(nvimgcodec: Any) -> dict[int, Any]:
    """How to decode 8 bits as stored, by the number of channels."""
    kinds = ((1, nvimgcodec.ColorSpec.GRAY), (3, nvimgcodec.ColorSpec.SRGB))
    return {
        channels: nvimgcodec.DecodeParams(
            color_spec=kind, apply_exif_orientation=False, allow_any_depth=False
        )
        for channels, kind in kinds
    }


class _PerThread(concurrency.local):
    decoder: Any = None
    image: Any = None


class NvimgcodecRegions:
    """See ``RegionDecoder``. JPEG at factor 1 only."""

    def __init__(self) -> None:
        self._nv = nvimgcodec_module()
        self._parameters = parameters(self._nv)
        self._mine = _PerThread()

    def decode(
        self, data: Buffer, header: Header, region: Region, factor: int, channels: int
    ) -> ImageHWC | None:
        if factor != 1:
            return None
        nv, mine = self._nv, self._mine
        if mine.decoder is None:
            mine.decoder = cpu_decoder(nv)
        top, left, height, width = region
        source = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
        stream = nv.CodeStream(source).get_sub_code_stream(
            0, nv.Region(top, left, top + height, left + width)
        )
        image = mine.decoder.decode(stream, params=self._parameters[channels], image=mine.image)
        mine.image = image if image is not None and height * width * channels <= KEPT_NBYTES else None
        if image is None:
            return None
        pixels: ImageHWC = np.asarray(image)
        return pixels if pixels.shape == (height, width, channels) else None
