"""The demo's own images: drawn shapes as JPEG tar shards, made once and kept in the user's cache folder."""

from __future__ import annotations

import io
import math
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipegraph.errors import DataError, extra_module
from pipegraph.reader.local_index import cache_folder

CLASSES = ("circle", "ring", "square", "triangle", "star", "cross", "bar", "half-moon")
IMAGES = 3200
SHARDS = 8
SIZE = 128
NAME = "demo-shapes-1"
"""The folder's name; its number is raised whenever the images change."""


def shapes_folder(say: Callable[[str], None], images: int = IMAGES) -> Path:
    """The folder of shards; draws them if they are not there.

    Two processes may draw at the same time: each into a folder of its own, and the first to finish renames
    it into place. So the folder, where it exists, is whole.
    """
    folder = cache_folder() / (NAME if images == IMAGES else f"{NAME}-{images}")
    if folder.is_dir():
        return folder
    say(f"drawing {images:,} images of {len(CLASSES)} shapes into {folder} (once)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for shard in range(SHARDS):
            write_shard(draft / f"shapes-{shard:03d}.tar", range(shard, images, SHARDS))
        try:
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def write_shard(path: Path, numbers: range) -> None:
    """Write the images of these numbers as one tar shard."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            label = (number // SHARDS) % len(CLASSES)
            _add(tar, f"{number:06d}.jpg", encoded(draw(label, np.random.default_rng([7, number]))))
            _add(tar, f"{number:06d}.cls", str(label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _cv2() -> Any:
    return extra_module("cv2", "images", "drawing the demo's images")


def encoded(image: NDArray[np.uint8]) -> bytes:
    """The image (uint8, height x width x 3) as JPEG."""
    cv2 = _cv2()
    return bytes(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 90])[1])


def draw(label: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One shape on a noisy gradient: uint8 (SIZE, SIZE, 3), its colour, place, size and angle drawn by ``rng``."""
    cv2 = _cv2()
    ramp = np.linspace(0, 1, SIZE)[:, None, None]
    back, other, fore = (rng.integers(0, 256, 3).astype(float) for _ in range(3))
    if np.abs(fore - back).sum() < 250:
        fore = (back + 128) % 256
    image = back * (1 - ramp) + (0.8 * back + 0.2 * other) * ramp
    image = np.repeat(image, SIZE, axis=1) + rng.normal(0, 8, (SIZE, SIZE, 3))
    drawn = np.ascontiguousarray(np.clip(image, 0, 255).astype(np.uint8))
    radius = float(rng.uniform(0.28, 0.44)) * SIZE
    center = rng.uniform(radius, SIZE - radius, 2) if radius < SIZE / 2 else np.full(2, SIZE / 2)
    angle = float(rng.uniform(0, 2 * math.pi))
    colour = tuple(int(value) for value in fore)
    middle = (int(center[0]), int(center[1]))
    name = CLASSES[label]
    if name in ("circle", "ring"):
        width = -1 if name == "circle" else max(3, int(0.3 * radius))
        cv2.circle(drawn, middle, int(radius * 0.85), colour, width, cv2.LINE_AA)
    elif name == "half-moon":
        axes = (int(radius), int(radius))
        cv2.ellipse(drawn, middle, axes, math.degrees(angle), 0, 180, colour, -1, cv2.LINE_AA)
    else:
        for corners in _outlines(name):
            turned = [
                center + radius * length * np.array([math.cos(angle + turn), math.sin(angle + turn)])
                for length, turn in corners
            ]
            points = np.round(np.array(turned)).astype(np.int32)
            cv2.fillPoly(drawn, [points], colour, cv2.LINE_AA)
    return drawn


def _outlines(name: str) -> list[list[tuple[float, float]]]:
    """Polygons as (share of the radius, angle) of their corners."""

    def box(width: float, height: float) -> list[tuple[float, float]]:
        corners = ((width, height), (-width, height), (-width, -height), (width, -height))
        return [(math.hypot(x, y), math.atan2(y, x)) for x, y in corners]

    def regular(points: int) -> list[tuple[float, float]]:
        return [(1.0, 2 * math.pi * k / points) for k in range(points)]

    if name == "square":
        return [box(0.7, 0.7)]
    if name == "triangle":
        return [regular(3)]
    if name == "star":
        return [[(1.0 if k % 2 == 0 else 0.42, math.pi * k / 5) for k in range(10)]]
    if name == "cross":
        return [box(0.95, 0.28), box(0.28, 0.95)]
    return [box(0.98, 0.2)]


SHARDS = 2
IMAGES = 512
PER_CLASS = 24
TOKENS = 65_536
VOCABULARY = 512


def make_files(folder: str) -> list[str]:
    """Draw the examples' files into ``folder``, the same bytes each time; returns a line for each kind."""
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise DataError(f"--make {folder!r}: a file of that name exists; name a folder")
    return [_shards(root / "data"), _photos(root / "photos"), _tokens(root / "tokens")]


def _shards(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(SHARDS):
        write_shard(folder / f"train-{shard:03d}.tar", range(shard, IMAGES, SHARDS))
    return (
        f"{folder}/train-{{000..{SHARDS - 1:03d}}}.tar: {IMAGES} labelled JPEG images in {SHARDS} tar shards"
    )


def _photos(folder: Path) -> str:
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(PER_CLASS):
            image = draw(label, np.random.default_rng([11, label, number]))
            (folder / name / f"{number:02d}.jpg").write_bytes(encoded(image))
    return f"{folder}: {len(CLASSES) * PER_CLASS} JPEG files in {len(CLASSES)} class folders"


def _tokens(folder: Path) -> str:
    """Text that a model can learn: each token mostly follows from the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(13)
    noise = rng.integers(0, 7, TOKENS)
    tokens = (np.cumsum(noise * 3 + 1) % VOCABULARY).astype(np.uint16)
    tokens.tofile(folder / "train.bin")
    return f"{folder}/train.bin: {TOKENS:,} tokens as uint16, below {VOCABULARY}"
