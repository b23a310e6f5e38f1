"""``pipegraph demo --make FOLDER``: the small files that the examples of README and docs read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipegraph.cli.demo.shapes import CLASSES, draw, encoded, write_shard
from pipegraph.errors import DataError

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
