"""The files that the demo and the documentation's examples read: drawn shapes, and tokens. The same each time."""

from __future__ import annotations

import io
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipegraph.errors import DataError, extra_module

SIZE = 128
PER_CLASS = 24
TOKENS = 65_536
VOCABULARY = 512


def _polygon(corners: int, every_other: float = 1.0) -> NDArray[np.float64]:
    """The corners (corners, 2) of a regular polygon, or of a star."""
    numbers = np.arange(corners)
    angles = 2 * math.pi * numbers / corners
    radius = np.where(numbers % 2, every_other, 1.0)
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], 1)


# Where two outlines overlap nothing is drawn.
OUTLINES = {
    "circle": [_polygon(48)],
    "ring": [_polygon(48), 0.6 * _polygon(48)],
    "square": [_polygon(4)],
    "triangle": [_polygon(3)],
    "star": [_polygon(10, 0.42)],
    "cross": [_polygon(8, 0.25)],
    "bar": [_polygon(4) * (1.0, 0.25)],
    "half-moon": [_polygon(48)[:25]],
}
CLASSES = tuple(OUTLINES)


def write_shards(folder: Path, images: int, shards: int) -> None:
    """Write labelled images as tar shards ``train-000.tar`` ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for number in range(shard, images, shards):
                label = (number // shards) % len(CLASSES)
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
    return bytes(_cv2().imencode(".jpg", image)[1])


def draw(label: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One shape on a noisy ground: uint8 (SIZE, SIZE, 3), its colour, place, size and angle drawn by ``rng``."""
    cv2 = _cv2()
    ground, colour = rng.integers(0, 256, (2, 3))
    if np.abs(colour - ground).sum() < 250:
        colour = (ground + 128) % 256
    image: NDArray[np.uint8] = np.clip(ground + rng.normal(0, 8, (SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
    radius, angle = rng.uniform(0.28, 0.44) * SIZE, rng.uniform(0, 2 * math.pi)
    center = rng.uniform(radius, SIZE - radius, 2)
    turn = radius * np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    outlines = [np.round(center + outline @ turn).astype(np.int32) for outline in OUTLINES[CLASSES[label]]]
    cv2.fillPoly(image, outlines, colour.tolist(), cv2.LINE_AA)
    return image


def make_files(folder: str) -> list[str]:
    """Draw the examples' files into ``folder``; returns a line for each kind."""
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise DataError(f"--make {folder!r}: a file of that name exists; name a folder")
    write_shards(root / "data", 512, 2)
    for label, name in enumerate(CLASSES):
        (root / "photos" / name).mkdir(parents=True, exist_ok=True)
        for number in range(PER_CLASS):
            image = draw(label, np.random.default_rng([11, label, number]))
            (root / "photos" / name / f"{number:02d}.jpg").write_bytes(encoded(image))
    # Text that a model can learn: each token mostly follows from the one before.
    (root / "tokens").mkdir(exist_ok=True)
    steps = np.random.default_rng(13).integers(0, 7, TOKENS) * 3 + 1
    (np.cumsum(steps) % VOCABULARY).astype(np.uint16).tofile(root / "tokens" / "train.bin")
    return [
        f"{root}/data/train-{{000..001}}.tar: 512 labelled JPEG images in 2 tar shards",
        f"{root}/photos: {len(CLASSES) * PER_CLASS} JPEG files in {len(CLASSES)} class folders",
        f"{root}/tokens/train.bin: {TOKENS:,} tokens as uint16, below {VOCABULARY}",
    ]
