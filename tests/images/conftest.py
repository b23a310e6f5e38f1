"""Images for the tests: photographs from PIPEGRAPH_TEST_IMAGES, and odd files made here."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image


def scene(height: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A smooth made-up picture with some grain, uint8 RGB."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(30, 226, (4, 5, 3)).astype(np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return np.clip(smooth + rng.normal(0, 3, smooth.shape), 0, 255).astype(np.uint8)


def encoded(pixels: Any, kind: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    """``pixels`` saved by Pillow."""
    image = Image.fromarray(pixels)
    stream = io.BytesIO()
    (image.convert(mode) if mode else image).save(stream, kind, **options)
    return stream.getvalue()


def exif_with(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def opencv_jpeg(pixels: Any, *flags: int) -> bytes:
    return bytes(cv2.imencode(".jpg", pixels[:, :, ::-1], list(flags))[1])


def _odd_files() -> dict[str, bytes]:
    rgb = scene(93, 121)
    alpha = np.dstack([rgb, np.arange(rgb.shape[1], dtype=np.uint8)[None].repeat(rgb.shape[0], 0)])
    grey = rgb[:, :, 0]
    palette = Image.fromarray(rgb).quantize(40)
    files: dict[str, bytes] = {}

    def save(name: str, image: Image.Image, kind: str, **options: Any) -> None:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        files[name] = stream.getvalue()

    save("palette.png", palette, "PNG")
    save("palette-one-transparent.png", palette, "PNG", transparency=3)
    save("palette-transparency.png", palette, "PNG", transparency=bytes(range(0, 200, 5)))
    save("palette.gif", palette, "GIF")
    save("one-bit.png", Image.fromarray(grey).convert("1"), "PNG")
    for kind, end in (("PNG", "png"), ("WEBP", "webp"), ("BMP", "bmp"), ("TIFF", "tiff"), ("PPM", "ppm")):
        files[f"colour.{end}"] = encoded(rgb, kind)
    for kind, end in (("PNG", "png"), ("JPEG", "jpg"), ("TIFF", "tiff")):
        files[f"grey.{end}"] = encoded(grey, kind)
        files[f"one-pixel.{end}"] = encoded(rgb[:1, :1], kind)
    files["one-pixel.webp"] = encoded(rgb[:1, :1], "WEBP")
    files["one-row.jpg"] = encoded(rgb[:1], "JPEG")
    files["one-column.png"] = encoded(rgb[:, :1], "PNG")
    files["alpha.png"] = encoded(alpha, "PNG")
    files["alpha.webp"] = encoded(alpha, "WEBP")
    files["alpha-lossless.webp"] = encoded(alpha, "WEBP", lossless=True)
    files["lossless.webp"] = encoded(rgb, "WEBP", lossless=True)
    files["grey-alpha.png"] = encoded(alpha, "PNG", mode="LA")
    files["colour-transparent.png"] = encoded(rgb, "PNG", transparency=(9, 9, 9))
    files["grey-16-bit.png"] = encoded(grey.astype(np.uint16) * 257, "PNG")
    files["grey-16-bit.pgm"] = encoded(grey.astype(np.uint16) * 257, "PPM")
    files["grey-12-bit.pgm"] = b"P5 %d %d 4095\n" % grey.shape[::-1] + (grey.astype(">u2") * 16).tobytes()
    files["grey-16-bit.tiff"] = encoded(grey.astype(np.uint16) * 257, "TIFF")
    files["colour-16-bit.png"] = bytes(cv2.imencode(".png", rgb.astype(np.uint16) * 250)[1])
    files["cmyk.jpg"] = encoded(rgb, "JPEG", mode="CMYK")
    files["cmyk.tiff"] = encoded(rgb, "TIFF", mode="CMYK")
    files["progressive.jpg"] = encoded(rgb, "JPEG", progressive=True)
    files["rgb-stored.jpg"] = encoded(rgb, "JPEG", keep_rgb=True)
    files["restarts.jpg"] = opencv_jpeg(rgb, cv2.IMWRITE_JPEG_RST_INTERVAL, 3)
    for name in ("411", "420", "422", "440", "444"):
        sampling = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}")
        files[f"sampling-{name}.jpg"] = opencv_jpeg(rgb, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling)
    for value in range(1, 9):
        files[f"orientation-{value}.jpg"] = encoded(rgb, "JPEG", exif=exif_with(value))
        files[f"orientation-{value}.png"] = encoded(rgb, "PNG", exif=exif_with(value))
        files[f"orientation-{value}.webp"] = encoded(rgb, "WEBP", exif=exif_with(value))
    files["orientation-9.jpg"] = encoded(rgb, "JPEG", exif=exif_with(9))
    files["orientation-6.tiff"] = encoded(rgb, "TIFF", tiffinfo={0x0112: 6})
    files["orientation-6-cmyk.jpg"] = encoded(rgb, "JPEG", mode="CMYK", exif=exif_with(6))
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    files["orientation-in-xmp.jpg"] = encoded(rgb, "JPEG", xmp=xmp)
    plain = files["colour.png"]
    late = png_chunk(b"eXIf", exif_with(5).removeprefix(b"Exif\0\0"))
    files["orientation-after-pixels.png"] = plain[:-12] + late + plain[-12:]
    text = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    files["orientation-in-text.png"] = plain[:33] + text + plain[33:]
    files["trailing-zeros.jpg"] = files["sampling-420.jpg"] + bytes(300)
    files["no-end-chunk.png"] = plain[:-12]
    return files


@pytest.fixture(scope="session")
def odd_files() -> dict[str, bytes]:
    """Small files of every unusual kind, by name; all of them decode."""
    return _odd_files()


@pytest.fixture(scope="session")
def photographs() -> list[bytes]:
    """Encoded photographs; skips where PIPEGRAPH_TEST_IMAGES is not set."""
    folder = os.environ.get("PIPEGRAPH_TEST_IMAGES")
    if not folder:
        pytest.skip("PIPEGRAPH_TEST_IMAGES is not set: no photographs to test on")
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
    return [path.read_bytes() for path in paths[::4]]


@pytest.fixture(scope="session")
def make_scene() -> Any:
    return scene


@pytest.fixture(scope="session")
def encode() -> Any:
    return encoded
