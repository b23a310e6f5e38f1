"""Regions are drawn from sizes and numbers alone."""

from __future__ import annotations

import math

import cv2
import numpy as np
from hypothesis import given, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.operators.images.crop import (
    DRAWS,
    RandomResizedCrop,
    Region,
    crop_window,
)

sides = st.integers(1, 5000)


def draw(crop, flip, height, width, size, rng=None):
    return crop_window(crop, flip, height, width, size, () if rng is None else rng.random(DRAWS).tolist())


@given(height=sides, width=sides, seed=st.integers(0, 2**32))
def test_a_random_region_lies_inside_the_image(height, width, seed):
    region = draw(RandomResizedCrop(), 0.5, height, width, (224, 224), np.random.default_rng(seed)).region
    assert 0 <= region.top < region.top + region.height <= height
    assert 0 <= region.left < region.left + region.width <= width


@given(height=st.integers(100, 2000), seed=st.integers(0, 2**32))
def test_area_and_ratio_are_within_their_bounds(height, seed):
    crop = RandomResizedCrop(scale=(0.2, 0.6), ratio=(0.5, 2.0))
    region = draw(crop, 0.0, height, height, (64, 64), np.random.default_rng(seed)).region
    rounding = 3 / math.sqrt(0.1 * height * height)
    assert 0.2 - rounding <= region.height * region.width / height**2 <= 0.6 + rounding
    assert 0.5 * (1 - rounding) <= region.width / region.height <= 2.0 * (1 + rounding)


def test_a_crop_that_never_fits_becomes_the_largest_central_one():
    crop = RandomResizedCrop(scale=(1.0, 1.0))
    assert draw(crop, 0, 100, 1000, (9, 9), np.random.default_rng(0)).region == Region(0, 433, 100, 133)
    assert draw(crop, 0, 1000, 100, (9, 9), np.random.default_rng(0)).region == Region(433, 0, 133, 100)


def test_a_random_crop_is_taken_from_every_place_where_it_fits():
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4, 1).repeat(3, 2)
    graph = pg.Graph("crops", seed=1)
    crop = ops.RandomResizedCrop(scale=(0.25, 0.25), ratio=(1.0, 1.0))
    samples = [{"image": cv2.imencode(".png", pixels)[1].tobytes()}] * 200
    graph.add(ops.FromSequence(samples)).then(ops.DecodeImage(2, crop=crop))
    with graph.loader() as loader:
        found = {tuple(sample["image"][..., 0].flatten().tolist()) for sample in loader}
    places = [(top, left) for top in range(3) for left in range(3)]
    assert found == {tuple(pixels[t : t + 2, w : w + 2, 0].flatten().tolist()) for t, w in places}
