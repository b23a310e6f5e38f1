"""The limit of the ImageNet training recipe: hand-written loops on two threads, one decoder each.

Random resized crop to 224, flip, batches of 64, normalised float32 NCHW, written once into reused
buffers. Everything is drawn from the header; what differs is what must be decoded to get the region:

- OpenCV, full: the whole image, as most loaders do it;
- the backends of ``DecodeImage``: the region only, at a reduced scale where it is much larger than 224.

The fastest of these is what a framework with the same decoders can reach at best. With ``--cpu`` the
same functions run image by image in turn on one thread, and its CPU time is compared: on a machine that
is busy with other things the steadier figure.

    python benchmarks/image_recipe_ideal.py --images FOLDER --rounds 5
    python benchmarks/image_recipe_ideal.py --images FOLDER --rounds 5 --large [--cpu]
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import recipe
from harness import Contestant
from ideal import HandWritten
from image_recipe import check, enlarge
from images import BATCH, SIZE, WORKERS, add_images_option, one_thread_each, photographs

from pipegraph.operators.images.choice import note_of, open_backend
from pipegraph.operators.images.crop import DRAWS, RandomResizedCrop, crop_window
from pipegraph.operators.images.header import probe

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
        cut = crop_window(crop, 0.5, *header.size, (SIZE, SIZE), rng.random(DRAWS).tolist())
        backend.decode_into(data, header, cut, pixels, "linear")
        cv2.split(pixels, planes)
        for channel, plane in enumerate(planes):
            cv2.LUT(plane, table[channel], dst=row[channel])

    return fill


def makers() -> dict[str, Callable[[], Callable[[str, Any], None]]]:
    """One function per decoder, by name."""
    return {FULL: make_full_fill, **{name: partial(make_backend_fill, name) for name in BACKENDS}}


def contestants(paths: Sequence[str], warm: int, timed: int) -> list[Contestant]:
    """One loop per decoder."""

    def loop(name: str, make_fill: Callable[[], Any]) -> Contestant:
        def stream() -> HandWritten:
            return HandWritten(paths, make_fill, (3, SIZE, SIZE), np.float32)

        return Contestant(name, stream, warm, timed, BATCH)

    return [loop(name, make) for name, make in makers().items()]


def compare_cpu(paths: Sequence[str], rounds: int) -> dict[str, Any]:
    """CPU microseconds per image on one thread, and the ratios to full decoding, round by round.

    All decoders take turns at each image; every round draws the same crops anew.
    """
    row = np.empty((3, SIZE, SIZE), np.float32)
    taken: dict[str, list[float]] = {name: [] for name in makers()}
    for _ in range(rounds):
        random.seed(0)
        fills = {name: make() for name, make in makers().items()}
        spent = dict.fromkeys(fills, 0.0)
        turns, order = list(fills), random.Random(0)
        for path in paths:
            order.shuffle(turns)  # whoever comes later finds the file, and perhaps the code, in the cache
            for name in turns:
                start = time.thread_time()
                fills[name](path, row)
                spent[name] += time.thread_time() - start
        for name, seconds in spent.items():
            taken[name].append(1e6 * seconds / len(paths))
    return {
        name: {
            "cpu_us": harness.spread(values).to_dict(),
            "over_full": harness.spread(
                full / own for own, full in zip(values, taken[FULL], strict=True)
            ).to_dict(),
        }
        for name, values in taken.items()
    }


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    add_images_option(parser)
    parser.add_argument("--large", action="store_true", help="with photographs enlarged to 3000 x 2000")
    parser.add_argument("--cpu", action="store_true", help="CPU time on one thread instead of a race")
    options = parser.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    # Opened before the clock runs; says what was chosen.
    open_backend("auto")
    print(note_of("auto"))
    warm, timed = (1, 2) if options.large else (2, 6)
    configuration = {
        "images": timed * BATCH, "batch": BATCH, "size": SIZE, "workers": WORKERS, "rounds": options.rounds,
        "large": options.large, "auto": note_of("auto"),
    }  # fmt: skip
    script = "image_recipe_ideal" + ("_large" if options.large else "")
    with tempfile.TemporaryDirectory() as folder:
        used = enlarge(paths, Path(folder)) if options.large else paths
        if options.cpu:
            configuration |= {"images": len(used), "workers": 1}
            harness.header(CLAIM, configuration)
            results = compare_cpu(used, options.rounds)
            for name, row in results.items():
                print(f"{name:<14} {row['cpu_us']['median']:>8,.0f} us  x {row['over_full']}")
            if not options.no_record:
                print("recorded in", harness.record(f"{script}_cpu", CLAIM, configuration, results).name)
            return
        entered = contestants(used, warm, timed)
        harness.compare(script, CLAIM, configuration, entered, check, [FULL, "opencv"], "images", options)


if __name__ == "__main__":
    main()
