"""The Pillow backend, which is the reference: Pillow, decoding the whole image, every step in full precision.

Pillow shrinks with a filter that is widened by the scale (antialiased); the
crop is made first, so pixels outside the region have no part in the result. The antialiased linear filter,
Pillow's ``BILINEAR``, is the same on every backend: torchvision's ``Resize`` is this filter, on Pillow images by Pillow
itself and on tensors by ``torch.nn.functional.interpolate(antialias=True)``. What differs is the rounding: by one grey
level of torch's at most, and by two of Pillow's, of whole images, which are cropped after they are resized.
"""

from __future__ import annotations

import importlib.util
import io
from functools import cache
from typing import Any

import numpy as np

from pipegraph.errors import DecodeError, MissingExtraError, extra_module
from pipegraph.operators.images.crop import CropWindow
from pipegraph.operators.images.decoder import Buffer, ImageHWC, Interpolation
from pipegraph.operators.images.header import Header, check_size
from pipegraph.operators.images.orientation import oriented, stored_region


def pillow(feature: str) -> Any:
    """The module ``PIL.Image``."""
    return extra_module("PIL.Image", "images", feature, "Pillow")


def _fill(image: Any, out: ImageHWC, window: CropWindow, interpolation: Interpolation) -> None:
    """Scale a Pillow image of the window's region, oriented, to fill ``out``."""
    made = np.asarray(image.resize(out.shape[1::-1], _FILTERS[interpolation], box=window.box)).reshape(
        out.shape
    )
    np.copyto(out, made[:, ::-1] if window.flip else made)


def antialias_into(pixels: ImageHWC, out: ImageHWC, orientation: int, window: CropWindow) -> None:
    """Scale the pixels of the window's region (stored rows and columns) to fill ``out``, which is oriented."""
    seen = np.ascontiguousarray(oriented(pixels, orientation))
    seen = seen.reshape(seen.shape[:2]) if out.shape[2] == 1 else seen
    _fill(pillow("interpolation='antialias'").fromarray(seen), out, window, "antialias")


# Raster formats only: Pillow would hand EPS to Ghostscript, and WMF to the system.
_FORMATS = tuple("JPEG MPO PNG WEBP GIF BMP DIB TIFF PPM JPEG2000 AVIF ICO TGA".split())

# Values of PIL.Image.Resampling.
_FILTERS = {"nearest": 0, "linear": 2, "cubic": 3, "area": 4, "antialias": 2}

# Values of PIL.Image.Transpose for the EXIF orientations, as PIL.ImageOps.exif_transpose has them.
_TRANSPOSE = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


@cache
def _pil() -> tuple[Any, tuple[str, ...]]:
    """Pillow's ``Image`` module and those of ``_FORMATS`` that this build opens."""
    Image = pillow("decoding images")
    Image.init()
    return Image, tuple(name for name in _FORMATS if name in Image.OPEN)


def _refusal(data: Buffer, error: Exception) -> DecodeError:
    """What Pillow's complaint about ``data`` means to a user."""
    Image, formats = _pil()
    if isinstance(error, Image.UnidentifiedImageError):
        start = bytes(data[:8])
        return DecodeError(
            f"not an image of a known format ({', '.join(formats)}): "
            f"{len(data)} bytes that start with {start!r}"
        )
    return DecodeError(f"the image cannot be decoded: {error or type(error).__name__} ({len(data)} bytes)")


def probe_with_pillow(data: Buffer) -> Header:
    """``probe`` for what has no reader of its own."""
    Image, formats = _pil()
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
        check_size(*image.size)
        value = image.getexif().get(0x0112, 1)
        if image.format == "TIFF" and value != 1:  # Pillow turns TIFFs, and only these, when it loads them
            image.load()
            value = 1
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise nearly anything on broken bytes
        raise _refusal(data, error) from error
    kind = value if isinstance(value, int) and 1 <= value <= 8 else 1
    # Pillow scales what PPM holds to 16 bits, and calls that as it calls the 32 bits of a TIFF.
    bits = 16 if "16" in image.mode or (image.mode == "I" and image.format != "TIFF") else 8
    return Header(str(image.format), image.width, image.height, kind, image.mode, bits, plain=False)


def _refuse_cut_off(image: Any) -> None:
    """Raises DecodeError for a grey image of which convert() would cut off values: nothing says what its white is."""
    pixels = np.asarray(image)
    low, high = pixels.min(), pixels.max()
    fits = low >= 0 and high <= 255  # False for NaN
    if not fits or (high <= 1 and (pixels % 1).any()):
        raise DecodeError(
            f"a grey {image.format} of 32 bits per pixel, from {low} to {high}, of which 8 bits would not hold what "
            "it shows: make it one of 8 or 16 bits when you write it, or decode it in a Map of your own"
        )


class PillowBackend:
    """See the module; the other backends give it everything unusual."""

    name = "pillow"

    def __init__(self) -> None:
        # Not imported yet: the backends that keep one for unusual files may never need it.
        if importlib.util.find_spec("PIL") is None:
            raise MissingExtraError("Pillow", "images", "decoding images")

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        Image, formats = _pil()
        top, left, h, w = stored_region(window.region, header.orientation, *header.size)
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
            check_size(*image.size)
            if image.mode == "F" or (image.mode == "I" and header.bits != 16):
                _refuse_cut_off(image)
            if (h, w) != (image.height, image.width):
                image = image.crop((left, top, left + w, top + h))
            # Transparency is dropped, not blended; without this Pillow warns about it.
            image.info.pop("transparency", None)
            if image.mode.startswith("I;16") or (image.mode == "I" and header.bits == 16):
                # convert() would clip at 255 and leave white; the upper byte is what colour images keep.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("L" if out.shape[2] == 1 else "RGB")
            if header.orientation != 1:
                image = image.transpose(Image.Transpose(_TRANSPOSE[header.orientation]))
        except (DecodeError, MemoryError):
            raise
        except Exception as error:
            raise _refusal(data, error) from error
        _fill(image, out, window, interpolation)
