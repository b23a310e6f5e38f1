"""EXIF orientations, and where a region of the oriented image lies.

Orientation values are those of the EXIF tag 0x0112 (CIPA DC-008, "Orientation"):
1 as stored, 2 mirrored left-right, 3 turned by 180 degrees, 4 mirrored
top-bottom, 5 transposed, 6 to be turned clockwise by 90 degrees, 7 transposed
along the other diagonal, 8 to be turned counter-clockwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipegraph.operators.images.crop import Region

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
