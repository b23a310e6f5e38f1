"""Regions and pixels are turned as Pillow's ``exif_transpose`` turns them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image, ImageOps

from pipegraph.operators.images.crop import Region
from pipegraph.operators.images.orientation import (
    oriented,
    stored_region,
    swaps_sides,
)

HEIGHT, WIDTH = 7, 11
STORED = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH)


def transposed_by_pillow(value: int) -> np.ndarray:
    exif = Image.Exif()
    exif[0x0112] = value
    stream = io.BytesIO()
    Image.fromarray(STORED).save(stream, "PNG", exif=exif.tobytes())
    return np.asarray(ImageOps.exif_transpose(Image.open(stream)))


@pytest.mark.parametrize("value", range(1, 9))
def test_a_view_is_turned_as_pillow_turns_the_image(value):
    expected = transposed_by_pillow(value)
    assert np.array_equal(expected, oriented(STORED, value))
    assert np.array_equal(expected[:, ::-1], oriented(STORED, value, flip=True))
    assert swaps_sides(value) == (expected.shape != STORED.shape)


@given(value=st.integers(1, 8), data=st.data())
def test_a_region_of_the_oriented_image_is_found_in_the_stored_one(value, data):
    whole = oriented(STORED, value)
    height, width = whole.shape
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    region = Region(
        top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    )
    t, le, h, w = stored_region(region, value, height, width)
    seen = oriented(STORED[t : t + h, le : le + w], value)
    assert np.array_equal(whole[top : top + region.height, left : left + region.width], seen)
