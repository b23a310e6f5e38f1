"""What an encoded image is, as Pillow reads it from its header: format, size, orientation; no pixel is decoded.

Pillow needs the interpreter for 25 us per header, a walk over the segments of an ordinary JPEG for 6. The walk leaves
what is not ordinary, and orientations, to Pillow.
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipegraph.errors import DecodeError, extra_module
from pipegraph.operators.images.crop import swaps_sides

Interpolation = Literal["nearest", "linear", "cubic", "area", "antialias"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("nearest", "linear", "cubic", "area", "antialias")

Buffer = bytes | bytearray | memoryview
ImageHWC = npt.NDArray[np.uint8]

MAX_PIXELS = 89_478_485
"""Pixels of the largest image that is decoded: Pillow's own warning threshold (256 MiB as RGB)."""

# Raster formats only: Pillow would hand EPS to Ghostscript, and WMF to the system.
_FORMATS = tuple("JPEG MPO PNG WEBP GIF BMP DIB TIFF PPM JPEG2000 AVIF ICO TGA".split())

_ORIENTATION = 0x0112
_ORIENTATION_IN_PNG = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


class Header(NamedTuple):
    """What the first bytes of an encoded image say.

    Attributes:
        format: Pillow's name: ``"JPEG"`` (also of the first image of an MPO), ``"PNG"``, ``"WEBP"``, ``"GIF"`` ...
        width, height: in pixels as stored, before the orientation.
        orientation: EXIF value 1 to 8; 1 where there is none.
        mode: Pillow's: ``"L"``, ``"RGB"``, ``"P"``, ``"RGBA"``, ``"CMYK"``, ``"I;16"``, ``"1"`` ...
        plain: whether the image is greyscale or colour of 8 bits without palette
            and alpha: what every backend decodes by itself.
        complete: whether the end marker is there; without it Pillow judges the file.
        rows_at: where the number of rows stands in a JPEG whose rows are decoded one after the other (baseline, one
            scan); 0 in all others.
    """

    format: str
    width: int
    height: int
    orientation: int
    mode: str
    plain: bool
    complete: bool = True
    rows_at: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the oriented image."""
        if swaps_sides(self.orientation):
            return self.width, self.height
        return self.height, self.width


def pillow(feature: str) -> Any:
    """The module ``PIL.Image``."""
    return extra_module("PIL.Image", "images", feature, "Pillow")


@cache
def _opening() -> tuple[Any, tuple[str, ...]]:
    """Pillow's ``Image`` module and those of ``_FORMATS`` that this build opens."""
    Image = pillow("decoding images")
    Image.init()
    return Image, tuple(name for name in _FORMATS if name in Image.OPEN)


def opened(file: io.BytesIO) -> Any:
    """Pillow's image of an encoded one, whose size is checked."""
    Image, formats = _opening()
    image = Image.open(file, formats=formats)
    check_size(*image.size)
    return image


def refusal(data: bytes | bytearray | memoryview, error: Exception) -> DecodeError:
    """What Pillow's complaint about ``data`` means to a user."""
    Image, formats = _opening()
    if isinstance(error, Image.UnidentifiedImageError):
        start = bytes(data[:8])
        return DecodeError(
            f"not an image of a known format ({', '.join(formats)}), or one whose header is broken: "
            f"{len(data)} bytes that start with {start!r}"
        )
    return DecodeError(f"the image cannot be decoded: {error or type(error).__name__} ({len(data)} bytes)")


def probe(data: bytes | bytearray | memoryview) -> Header:
    """Read an image's header."""
    if not isinstance(data, bytes):
        data = _bytes_of(data)
    if not data:
        raise DecodeError("the image is empty: 0 bytes")
    try:
        if data.startswith(b"\xff\xd8") and (header := _ordinary_jpeg(data)) is not None:
            return header
        file = io.BytesIO(data)
        image = opened(file)
        at = file.tell()
        orientation = _orientation(image, data)
        if (
            image.format == "TIFF" and orientation != 1
        ):  # Pillow turns TIFFs, and only these, when it loads them
            image.load()
            orientation = 1
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise nearly anything on broken bytes
        raise refusal(data, error) from error
    plain = image.mode in ("L", "RGB") and not getattr(image, "is_animated", False)
    complete = True
    match image.format:
        case "JPEG" | "MPO":
            plain = image.mode in ("L", "RGB")
            complete = data.rfind(b"\xff\xd9", at) >= 0  # no other marker of pixels looks like this one
        case "PNG":
            plain = (
                plain and data[24] == 8 and "transparency" not in image.info
            )  # the header's bits per channel
            complete = _PNG_END in data
        case "WEBP":
            pass  # Pillow opens none that was cut short
        case _:
            plain = False
    kind = "JPEG" if image.format == "MPO" else str(image.format)
    return Header(kind, image.width, image.height, orientation, image.mode, plain, complete)


_segment = struct.Struct(">BBH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from
_OTHER_FRAMES = {*range(0xC3, 0xD0)} - {0xC4, 0xC8, 0xCC}
_TAGS = (b"\x01\x12", b"\x12\x01")


def _ordinary_jpeg(data: bytes) -> Header | None:
    """The header of a JPEG of 8 bits, grey or colour; None for all others."""
    place, exif, turned, frame, rows_at = 2, b"", False, None, 0
    try:
        while True:
            lead, marker, length = _segment(data, place)
            body, place = place + 4, place + 2 + length
            if lead != 0xFF or marker == 0xFF or marker in _OTHER_FRAMES:  # 0xFF: fill bytes between segments
                return None
            if marker == 0xDA:
                break
            if marker == 0xE1:
                turned = turned or data.find(b"Orientation", body, place) >= 0
                if data.startswith(b"Exif\0\0", body):
                    exif += data[body + 6 : place]  # several segments are one block
            elif 0xC0 <= marker <= 0xC2:
                frame = _frame(data, body)
                rows_at = body + 1 if marker < 0xC2 else 0
        scan_channels = data[body]
    except (struct.error, IndexError):
        return None
    if frame is None:
        return None
    bits, height, width, channels = frame
    if bits != 8 or channels not in (1, 3) or not height or not width:
        return None
    check_size(width, height)
    complete = data.rfind(b"\xff\xd9", place) >= 0  # no other marker of pixels looks like this one
    if scan_channels != channels:
        rows_at = 0
    turned = turned or any(tag in exif for tag in _TAGS)
    orientation = _orientation(opened(io.BytesIO(data)), data) if turned else 1
    mode = "L" if channels == 1 else "RGB"
    return Header("JPEG", width, height, orientation, mode, True, complete, rows_at)


def _orientation(image: Any, data: bytes) -> int:
    if image.format == "PNG" and not any(each in data for each in _ORIENTATION_IN_PNG):
        return 1  # Pillow would decode the pixels to see what stands behind them
    value = None
    with suppress(Exception):  # a broken block counts as none
        value = image.getexif().get(_ORIENTATION)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _bytes_of(data: Any) -> bytes:
    try:
        view = memoryview(data)
    except TypeError:
        hint = "; for a path put Load() before" if isinstance(data, str) else ""
        raise DecodeError(f"an image's encoded bytes are needed, got {type(data).__name__}{hint}") from None
    if view.ndim > 1:
        raise DecodeError(f"an image's encoded bytes are needed, got an array of shape {view.shape}")
    return bytes(view)


def check_size(width: int, height: int) -> None:
    """Refuse sizes that nothing sensible has, before memory is taken for them."""
    if width < 1 or height < 1:
        raise DecodeError(f"the image's header says {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise DecodeError(
            f"the image's header says {width}x{height} = {width * height} pixels, more than the limit of "
            f"{MAX_PIXELS}: a decompression bomb, or an image to be cut into tiles first"
        )
