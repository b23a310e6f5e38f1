"""What ``probe`` reads equals what Pillow reads, and what it refuses it explains."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from pipegraph.errors import DecodeError
from pipegraph.operators.images.header import MAX_PIXELS, probe


def orientation_by_pillow(data: bytes) -> int:
    image = Image.open(io.BytesIO(data))
    if image.format == "TIFF":  # turned while loading
        image.load()
    value = image.getexif().get(0x0112, 1)
    return value if value in range(1, 9) else 1


def test_every_odd_file_has_the_header_that_pillow_reads(odd_files):
    for name, data in odd_files.items():
        header, image = probe(data), Image.open(io.BytesIO(data))
        image.load()
        assert (name, image.format, image.size) == (name, header.format, (header.width, header.height))
        assert (name, image.mode) == (name, header.mode)
        assert (name, orientation_by_pillow(data)) == (name, header.orientation)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty: 0 bytes"),
        (b"key,label\n1,2\n", r"not an image of a known format .*14 bytes that start with b'key,labe'"),
        (b"\xff\xd8\xff\xe0\x00\x10JF", "Truncated File Read .8 bytes"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "Truncated File Read .16 bytes"),
        (b"RIFF\x04\0\0\0WEBPVP8X\x0a", "or one whose header is broken: 17 bytes|could not create decoder"),
    ],
)
def test_what_is_not_an_image_is_refused_saying_why(data, message):
    with pytest.raises(DecodeError, match=message):
        probe(data)


def test_a_header_that_announces_a_bomb_is_refused(odd_files):
    data = bytearray(odd_files["sampling-420.jpg"])
    struct.pack_into(">HH", data, probe(data).rows_at, 65535, 65535)
    with pytest.raises(DecodeError, match="4294836225 pixels"):
        probe(data)
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    png = (
        odd_files["colour.png"][:12]
        + ihdr
        + struct.pack(">I", zlib.crc32(ihdr))
        + odd_files["colour.png"][33:]
    )
    with pytest.raises(DecodeError, match="10000000000 pixels"):
        probe(png)


@settings(max_examples=300)
@given(data=st.data())
def test_broken_headers_are_read_or_refused_and_nothing_else(odd_files, data):
    name = data.draw(st.sampled_from(["orientation-6.jpg", "palette-transparency.png", "orientation-3.webp"]))
    broken = bytearray(odd_files[name])
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    del broken[data.draw(st.integers(1, len(broken))) :]
    with contextlib.suppress(DecodeError):
        header = probe(broken)
        assert 1 <= header.width * header.height <= MAX_PIXELS
