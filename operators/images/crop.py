"""Chooses the region of an image to decode: drawn from its size alone, before a pixel is decoded; and where a region of
the oriented image lies in the stored one.

Regions are in the coordinates of the *oriented* image, the one a viewer shows
after the EXIF orientation. All backends are given the same region, so the same
generator state gives the same crop whatever decodes it.

Orientation values are those of the EXIF tag 0x0112 (CIPA DC-008, "Orientation"):
1 as stored, 2 mirrored left-right, 3 turned by 180 degrees, 4 mirrored
top-bottom, 5 transposed, 6 to be turned clockwise by 90 degrees, 7 transposed
along the other diagonal, 8 to be turned counter-clockwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from pipegraph.errors import GraphError, shown
from pipegraph.integers import integer

TRIES = 10
"""How often a random crop that does not fit is drawn again; torchvision's number."""

DRAWS = 3 + 2 * TRIES
"""Uniform numbers that one sample consumes, always all of them, in this order: 0 the flip,
1 the crop's top, 2 its left, then for each try its area and its aspect ratio."""


class Region(NamedTuple):
    """A rectangle of the oriented image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Box(NamedTuple):
    """A rectangle with fractions of pixels, in the coordinates of a region."""

    left: float
    top: float
    right: float
    bottom: float


class CropWindow(NamedTuple):
    """What was drawn for one sample: the region, and whether it is mirrored left to right.

    ``box`` is the part of the region that fills the output where that is not all of it: the pixels around it then have
    a part in those at its edge.
    """

    region: Region
    flip: bool
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A crop of random area and aspect ratio at a random place.

    The distribution is that of torchvision's ``RandomResizedCrop.get_params``:
    area uniform in ``scale``, ratio (width / height) log-uniform in ``ratio``,
    ten tries, then the largest central region within the ratio's bounds.

    Args:
        scale: smallest and largest share of the image's area, above 0, at most 1.
        ratio: smallest and largest width / height, above 0.

    Raises:
        GraphError: a bound is out of its range, or the bounds are reversed.
    """

    random: ClassVar[bool] = True
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, pair in (("scale", self.scale), ("ratio", self.ratio)):
            plain = isinstance(pair, tuple | list) and len(pair) == 2
            if not plain or any(isinstance(n, bool) or not isinstance(n, int | float) for n in pair):
                raise GraphError(f"RandomResizedCrop: {name} must be a pair of numbers, got {shown(pair)}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise GraphError(f"RandomResizedCrop: scale must satisfy 0 < low <= high <= 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise GraphError(f"RandomResizedCrop: ratio must satisfy 0 < low <= high, got {self.ratio}")

    def region(
        self, height: int, width: int, out_height: int, out_width: int, numbers: Sequence[float]
    ) -> Region:
        """The region that ``DRAWS`` uniform ``numbers`` of [0, 1) choose; pure."""
        low, high = self.scale
        log_low, log_high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for i in range(3, DRAWS, 2):
            area = height * width * (low + (high - low) * numbers[i])
            ratio = math.exp(log_low + (log_high - log_low) * numbers[i + 1])
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = int(numbers[1] * (height - h + 1)), int(numbers[2] * (width - w + 1))
                return Region(top, left, h, w)
        h, w = height, width
        if width < height * self.ratio[0]:
            h = max(1, min(height, round(width / self.ratio[0])))
        elif width > height * self.ratio[1]:
            w = max(1, min(width, round(height * self.ratio[1])))
        return Region((height - h) // 2, (width - w) // 2, h, w)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The usual evaluation crop: the shorter side scaled to ``resize``, then the centre cut out.

    Nothing is resized twice: the region is the part of the original, to the
    nearest pixel, that the two steps would show.

    Args:
        resize: length of the shorter side in pixels before the centre is cut out.

    Raises:
        GraphError: ``resize`` is below 1.
    """

    random: ClassVar[bool] = False
    resize: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "resize", integer(self.resize, "CenterCrop: resize"))

    def region(
        self, height: int, width: int, out_height: int, out_width: int, numbers: Sequence[float]
    ) -> Region:
        """The central region for an output of ``out_height`` x ``out_width``; draws nothing."""
        scale = min(height, width) / self.resize
        h = max(1, min(height, round(out_height * scale)))
        w = max(1, min(width, round(out_width * scale)))
        return Region((height - h) // 2, (width - w) // 2, h, w)

    def exact(self, height: int, width: int, out_height: int, out_width: int) -> tuple[Region, Box]:
        """What torchvision's ``Resize`` and ``CenterCrop`` show, to a fraction of a pixel, and what surrounds it.

        Sizes and offsets are rounded as torchvision rounds them.
        """
        short = min(height, width)
        tall = self.resize if height == short else int(self.resize * height / short)
        wide = self.resize if width == short else int(self.resize * width / short)
        top, bottom = _span(height, tall, round((tall - out_height) / 2.0), out_height)
        left, right = _span(width, wide, round((wide - out_width) / 2.0), out_width)
        # A linear filter that is widened by the scale reaches so far beyond what it fills.
        reach = math.ceil(max(1.0, height / tall, width / wide)) + 1
        first_row, first_column = max(0, math.floor(top) - reach), max(0, math.floor(left) - reach)
        region = Region(
            first_row,
            first_column,
            min(height, math.ceil(bottom) + reach) - first_row,
            min(width, math.ceil(right) + reach) - first_column,
        )
        return region, Box(left - first_column, top - first_row, right - first_column, bottom - first_row)


def _span(length: int, resized: int, start: int, count: int) -> tuple[float, float]:
    """Where pixels ``start`` to ``start + count`` of ``resized`` lie in ``length``."""
    return start * length / resized, min(float(length), (start + count) * length / resized)


Crop = RandomResizedCrop | CenterCrop | None
"""``None`` is the whole image, scaled to the output's size without keeping its aspect ratio."""


def check_crop(crop: Crop, size: tuple[int, int]) -> None:
    """Refuse a crop that cannot fill ``size`` (height, width)."""
    if crop is not None and not isinstance(crop, RandomResizedCrop | CenterCrop):
        kinds = {RandomResizedCrop: "RandomResizedCrop()", CenterCrop: "CenterCrop()"}
        meant = f": did you mean ops.{kinds[crop]}?" if isinstance(crop, type) and crop in kinds else ""
        raise GraphError(
            "DecodeImage: crop must be ops.RandomResizedCrop(...), ops.CenterCrop(resize) or None, "
            f"got {shown(crop)}{meant}"
        )
    if isinstance(crop, CenterCrop) and max(size) > crop.resize:
        raise GraphError(
            f"CenterCrop(resize={crop.resize}) cannot fill an output of {size[0]}x{size[1]}: "
            f"use resize >= {max(size)}"
        )


def crop_window(
    crop: Crop,
    flip: float,
    height: int,
    width: int,
    size: tuple[int, int],
    numbers: Sequence[float],
    exact: bool = False,
) -> CropWindow:
    """One sample's region and flip, as its ``DRAWS`` numbers of [0, 1) choose (none where nothing is random); pure.

    ``height`` and ``width`` are the oriented image's, ``size`` the output's; ``exact`` cuts the centre to a fraction of
    a pixel.
    """
    mirrored = bool(flip) and numbers[0] < flip
    if exact and isinstance(crop, CenterCrop):
        region, box = crop.exact(height, width, *size)
        return CropWindow(region, mirrored, box)
    if crop is None:
        region = Region(0, 0, height, width)
    else:
        region = crop.region(height, width, size[0], size[1], numbers)
    return CropWindow(region, mirrored)


# (rows and columns swapped, then rows reversed, then columns reversed):
# oriented = stored, transposed if the first, then reversed as the others say.
STEPS: dict[int, tuple[bool, bool, bool]] = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def swaps_sides(orientation: int) -> bool:
    """Whether height and width change places between the stored and the oriented image."""
    return STEPS[orientation][0]


def stored_region(region: Region, orientation: int, height: int, width: int) -> Region:
    """Where ``region`` of the oriented image, of ``height`` x ``width``, lies in the stored one."""
    swap, rows_reversed, columns_reversed = STEPS[orientation]
    top, left, h, w = region
    if rows_reversed:
        top = height - top - h
    if columns_reversed:
        left = width - left - w
    return Region(left, top, w, h) if swap else Region(top, left, h, w)


def oriented(image_HWC: npt.NDArray[Any], orientation: int, flip: bool = False) -> npt.NDArray[Any]:
    """A view of ``image_HWC`` (stored rows and columns) as it is to be seen, then mirrored if ``flip``."""
    swap, rows_reversed, columns_reversed = STEPS[orientation]
    view = np.swapaxes(image_HWC, 0, 1) if swap else image_HWC
    rows = slice(None, None, -1) if rows_reversed else slice(None)
    columns = slice(None, None, -1) if columns_reversed != flip else slice(None)
    return view[rows, columns]
