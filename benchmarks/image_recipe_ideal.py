"""The limit of the ImageNet training recipe: hand-written loops on two threads, one decoder each.

Random resized crop to 224, flip, batches of 64, normalised float32 NCHW, written once into reused
buffers. Everything is drawn from the header; what differs is what must be decoded to get the region:

- OpenCV, full: the whole image, as most loaders do it;
- the backends of ``DecodeImage``: the region only, at a reduced scale where it is much larger than 224.

The fastest of these is what a framework with the same decoders can reach at best.

    python benchmarks/image_recipe_ideal.py --images FOLDER --rounds 5
    python benchmarks/image_recipe_ideal.py --images FOLDER --rounds 5 --large
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import recipe
from harness import Contestant
from ideal import HandWritten
from image_recipe import check, enlarge
from images import BATCH, SIZE, WORKERS, add_images_option, one_thread_each, photographs

from pipegraph.operators.images import RandomResizedCrop, draw, open_backend, probe

CLAIM = "region decode beats full decode; at 3000 x 2000 by 2.5 times"
FULL = "OpenCV, full"
BACKENDS = ("pillow", "opencv", "simplejpeg", "nvimgcodec", "auto")


def make_full_fill() -> Callable[[str, Any], None]:
    """The usual OpenCV way (full decode, crop, resize, flip), normalised by table."""
    import cv2

    table = recipe.tables()

    def fill(path: str, row: Any) -> None:
        for channel, plane in enumerate(cv2.split(recipe.opencv_crop_path(path))):
            cv2.LUT(plane, table[channel], dst=row[channel])

    return fill


def make_backend_fill(name: str) -> Callable[[str, Any], None]:
    """``DecodeImage``'s own steps, called by hand, normalised by table."""
    import cv2

    backend, table, crop = open_backend(name), recipe.tables(), RandomResizedCrop()
    rng = np.random.default_rng(0)
    pixels = np.empty((SIZE, SIZE, 3), np.uint8)
    planes = list(np.empty((3, SIZE, SIZE), np.uint8))

    def fill(path: str, row: Any) -> None:
        with open(path, "rb") as file:
            data = file.read()
        header = probe(data)
        cut = draw(crop, 0.5, *header.size, (SIZE, SIZE), rng)
        backend.decode_into(data, header, cut, pixels)
        cv2.split(pixels, planes)
        for channel, plane in enumerate(planes):
            cv2.LUT(plane, table[channel], dst=row[channel])

    return fill


def contestants(paths: Sequence[str], warm: int, timed: int) -> list[Contestant]:
    """One loop per decoder."""

    def loop(name: str, make_fill: Callable[[], Any]) -> Contestant:
        def stream() -> HandWritten:
            return HandWritten(paths, make_fill, (3, SIZE, SIZE), np.float32)

        return Contestant(name, stream, warm, timed, BATCH)

    ours = [loop(name, lambda name=name: make_backend_fill(name)) for name in BACKENDS]  # type: ignore[misc]
    return [loop(FULL, make_full_fill), *ours]


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    add_images_option(parser)
    parser.add_argument("--large", action="store_true", help="with photographs enlarged to 3000 x 2000")
    options = parser.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    # Calibrate before the clock runs, and say what was chosen.
    print(open_backend("auto").describe())
    warm, timed = (1, 2) if options.large else (2, 6)
    configuration = {
        "images": timed * BATCH, "batch": BATCH, "size": SIZE, "workers": WORKERS, "rounds": options.rounds,
        "large": options.large, "auto": open_backend("auto").describe(),
    }  # fmt: skip
    script = "image_recipe_ideal_large" if options.large else "image_recipe_ideal"
    with tempfile.TemporaryDirectory() as folder:
        used = enlarge(paths, Path(folder)) if options.large else paths
        entered = contestants(used, warm, timed)
        harness.compare(script, CLAIM, configuration, entered, check, [FULL, "opencv"], "images", options)


if __name__ == "__main__":
    main()
