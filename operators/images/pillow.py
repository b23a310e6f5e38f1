"""The Pillow backend, which is the reference: Pillow, decoding the whole image, every step in full precision.

Pillow shrinks with a filter that is widened by the scale (antialiased); the
crop is made first, so pixels outside the region have no part in the result. The antialiased linear filter,
Pillow's ``BILINEAR``, is the same on every backend: torchvision's ``Resize`` is this filter, on Pillow images by Pillow
itself and on tensors by ``torch.nn.functional.interpolate(antialias=True)``. What differs is the rounding: by one grey
level of torch's at most, and by two of Pillow's, of whole images, which are cropped after they are resized.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from pipegraph.errors import DecodeError
from pipegraph.operators.images.crop import CropWindow
from pipegraph.operators.images.decoder import Buffer, ImageHWC, Interpolation
from pipegraph.operators.images.header import Header, opened, pillow, refusal
from pipegraph.operators.images.orientation import oriented, stored_region


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


# Values of PIL.Image.Resampling.
_FILTERS = {"nearest": 0, "linear": 2, "cubic": 3, "area": 4, "antialias": 2}

# Values of PIL.Image.Transpose for the EXIF orientations, as PIL.ImageOps.exif_transpose has them.
_TRANSPOSE = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


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

    def __init__(self) -> None:
        self._images = pillow("decoding images")

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        Image = self._images
        top, left, h, w = stored_region(window.region, header.orientation, *header.size)
        try:
            image = opened(io.BytesIO(data))
            # Pillow scales what PPM holds to 16 bits, and calls that as it calls the 32 bits of a TIFF.
            sixteen = image.mode.startswith("I;16") or (image.mode == "I" and header.format != "TIFF")
            if image.mode in ("F", "I") and not sixteen:
                _refuse_cut_off(image)
            if (h, w) != (image.height, image.width):
                image = image.crop((left, top, left + w, top + h))
            # Transparency is dropped, not blended; without this Pillow warns about it.
            image.info.pop("transparency", None)
            if sixteen:
                # convert() would clip at 255 and leave white; the upper byte is what colour images keep.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("L" if out.shape[2] == 1 else "RGB")
            if header.orientation != 1:
                image = image.transpose(Image.Transpose(_TRANSPOSE[header.orientation]))
        except (DecodeError, MemoryError):
            raise
        except Exception as error:
            raise refusal(data, error) from error
        _fill(image, out, window, interpolation)
