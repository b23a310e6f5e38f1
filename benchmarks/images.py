"""The photographs and the one decode function that the image benchmarks share."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Repeat
from numpy.typing import NDArray

SIZE = 224
BATCH = 64
WORKERS = 2
# Passes over the shards: ``repeat()`` would cut a short batch at the end of each.
ENDLESS_EPOCHS = 2000
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def photographs(folder: str | None) -> list[str]:
    """Paths of the images in ``folder``, sorted.

    Raises:
        SystemExit: there is no folder, or no image in it.
    """
    if not folder:
        raise SystemExit("no photographs: give --images FOLDER or set PIPEGRAPH_TEST_IMAGES")
    paths = sorted(str(path) for path in Path(folder).iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise SystemExit(f"no images in {folder} (looked for {', '.join(SUFFIXES)})")
    return paths


def files(graph: Any, paths: Sequence[str]) -> Any:
    """The photographs without end, as a stage of a graph; inline: who decodes an image reads it too."""
    from pipegraph import operators as ops

    def samples() -> Iterator[dict[str, str]]:
        return ({"key": str(i), "path": path} for i, path in enumerate(Repeat(paths)))

    return graph.add(ops.FromIterable(samples)).then(ops.Load(), backend="inline")


def one_thread_each() -> None:
    """Keep torch and OpenCV from starting threads of their own: the workers are the parallelism."""
    import cv2
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(0)


def load(path: str) -> NDArray[np.uint8]:
    """The job: read, decode, resize. RGB uint8 (SIZE, SIZE, 3)."""
    with open(path, "rb") as file:
        return decode(file.read())


def decode(data: bytes) -> NDArray[np.uint8]:
    """Encoded bytes to RGB uint8 (SIZE, SIZE, 3), linear interpolation."""
    import cv2

    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    resized: Any = cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
    return resized  # type: ignore[no-any-return]


def write_shards(paths: Sequence[str], folder: Path, shards: int) -> list[str]:
    """The photographs as ``shards`` tar files, dealt in turn; for readers of shards. Returns their paths."""
    names = [str(folder / f"photographs-{shard:03d}.tar") for shard in range(shards)]
    for shard, name in enumerate(names):
        with tarfile.open(name, "w") as tar:
            for path in paths[shard::shards]:
                tar.add(path, arcname=Path(path).stem.replace(".", "_") + ".jpg")
    return names
