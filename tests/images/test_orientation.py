"""Regions and pixels are turned as Pillow's ``exif_transpose`` turns them."""

from __future__ import annotations

import io
import random
import struct
import warnings
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image, ImageOps

from pipegraph.operators.images.crop import Region
from pipegraph.operators.images.orientation import (
    _plain,
    orientation_of,
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


XMP = b'tiff:Orientation="7"'


def exif_block(order: str, entries: list[bytes], start: int = 8) -> bytes:
    """A directory of ``entries`` and 40 bytes for their values."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "L", start) + bytes(start - 8)
    return head + struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4) + bytes(range(40))


def entry(order: str, tag: int, kind: int, count: int, word: int) -> bytes:
    """The last four bytes are a number where ``kind`` says so, a SHORT for example."""
    value = struct.pack(order + "H2x", word) if kind == 3 and word < 65536 else struct.pack(order + "L", word)
    return struct.pack(order + "HHL", tag, kind, count) + value


def check_as_pillow(block: bytes) -> None:
    """Also where a warning is an error: one that Pillow gives about the block is given."""
    for action in ("ignore", "error"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            value = None
            with suppress(Exception):
                exif = Image.Exif()
                exif.load(block)
                value = exif.get(0x0112)
            expected = 7 if value is None else value if isinstance(value, int) and 1 <= value <= 8 else 1
            assert orientation_of(block, XMP) == expected, (action, block)


@pytest.mark.parametrize("order", "<>")
def test_every_kind_of_orientation_tag_is_read_as_by_pillow(order):
    text = entry(order, 0x010F, 2, 30, 30)
    for value, kind, count in product((*range(11), 40, 65535, 6 << 16), range(17), (0, 1, 2, 3, 1 << 30)):
        tag = entry(order, 0x0112, kind, count, value)
        check_as_pillow(exif_block(order, [text, tag]))
    for value in range(1, 9):
        assert _plain(exif_block(order, [text, entry(order, 0x0112, 3, 1, value)])) == value
    assert _plain(exif_block(order, [text])) is None


@pytest.mark.parametrize("order", "<>")
def test_a_block_that_ends_anywhere_is_read_as_by_pillow(order):
    tags = [entry(order, 0x010F, 2, 30, 30), entry(order, 0x0112, 3, 1, 6), entry(order, 0x011A, 5, 1, 40)]
    other = entry(order, 0x0112, 3, 1, 3)
    for entries, start in product((tags, tags[::-1], [tags[1], *tags], [*tags, other], []), (8, 9, 20)):
        block = exif_block(order, entries, start)
        for length in range(len(block) + 1):
            check_as_pillow(block[:length])
        check_as_pillow(b"Exif\0\0" + block)


def test_random_and_damaged_blocks_are_read_as_by_pillow():
    rng, plain = random.Random(0), 0
    words = (0, 1, 6, 8, 26, 60, 90, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)
    for _ in range(4000):
        order = rng.choice("<>")
        tags = [rng.choice((0x010F, 0x0112, 0x8769, rng.randrange(65536))) for _ in range(rng.randrange(4))]
        kinds = [rng.choice((2, 3, 3, 3, 4, 5, 12, 13, rng.randrange(65536))) for _ in tags]
        counts = [rng.choice((1, 1, 1, 1, 0, 2, 5, 30, rng.choice(words))) for _ in tags]
        entries = [entry(order, *each, rng.choice(words)) for each in zip(tags, kinds, counts, strict=True)]
        block = bytearray(exif_block(order, entries))
        for _ in range(rng.choice((0, 0, 1, 3))):
            block[rng.randrange(len(block))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        check_as_pillow(bytes(block[: rng.choice((len(block), rng.randrange(len(block))))]))
        plain += _plain(bytes(block)) != 0
    assert plain > 1000
