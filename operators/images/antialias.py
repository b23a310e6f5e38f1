"""Antialiased linear resizing, the same on every backend: Pillow's ``BILINEAR``.

torchvision's ``Resize`` is this filter, on Pillow images by Pillow itself and on tensors by
``torch.nn.functional.interpolate(antialias=True)``, which differs from it by one grey level at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipegraph.errors import MissingExtraError
from pipegraph.operators.images.crop import CropWindow
from pipegraph.operators.images.decoder import ImageHWC
from pipegraph.operators.images.orientation import oriented


def pillow(feature: str) -> Any:
    """The module ``PIL.Image``.

    Raises:
        MissingExtraError: it is not installed; says what ``feature`` needs it.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "images", feature) from error
    return Image


def resized(image: Any, window: CropWindow, height: int, width: int) -> Any:
    """A Pillow image of the window's region, oriented, as the output of this size shows it, before it is mirrored."""
    return image.resize((width, height), 2, box=window.box)  # 2 is PIL.Image.Resampling.BILINEAR


def antialias_into(pixels: ImageHWC, out: ImageHWC, orientation: int, window: CropWindow) -> None:
    """Scale the pixels of the window's region (stored rows and columns) to fill ``out``.

    Args:
        pixels: uint8 (rows, columns[, channels]).
        out: uint8 (height, width, channels), oriented; all of it is written.
    """
    seen = np.ascontiguousarray(oriented(pixels, orientation))
    image = pillow("interpolation='antialias'").fromarray(
        seen.reshape(seen.shape[:2]) if out.shape[2] == 1 else seen
    )
    made = np.asarray(resized(image, window, *out.shape[:2])).reshape(out.shape)
    np.copyto(out, made[:, ::-1] if window.flip else made)
