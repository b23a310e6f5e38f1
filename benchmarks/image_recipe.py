"""The ImageNet training recipe: random resized crop to 224, flip, batches of 64, normalised float32 NCHW.

Claim: at least 1.4 times the best peer in the same run, at least 2 times DataLoader with Pillow
transforms, at least 0.95 of a hand-written loop with the same decoder. With ``--large`` (photographs
enlarged to 3000 x 2000): at least 2.5 times the best peer that decodes fully.

Each peer runs in its own best way (``recipe_peers.py``): OpenCV's full decode with the normalisation
done a batch at a time in its workers, DALI's and SPDL's own decoders, DataLoader also with Pillow. One
more row runs the hand-written loop's own function in torchdata.nodes: what the function earns, and what
the framework. ``--large`` leaves out what can only come behind another row there.

    python benchmarks/image_recipe.py --images FOLDER --rounds 5
    python benchmarks/image_recipe.py --images FOLDER --rounds 3 --large
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np
import recipe
import recipe_peers as peers
from harness import Contestant
from ideal import PREFETCH, HandWritten
from images import BATCH, SIZE, WORKERS, add_images_option, one_thread_each, photographs

CLAIM = ">= 1.4 x the best peer, >= 2 x DataLoader with Pillow, >= 0.95 of a hand-written loop"
LARGE_CLAIM = "3000 x 2000: >= 2.5 x the best peer that decodes fully"
IDEAL = "hand-written, OpenCV"
REGION = "hand-written, region decode"
OURS = "pipegraph, auto"
WARM, TIMED = 10, 32
# 3000 x 2000: even numbers, as batches come in pairs where two workers make whole ones; fewer where all is decoded.
LARGE_WARM, LARGE_TIMED = 2, 2
LARGE_FAST = {IDEAL: 12, REGION: 12, OURS: 12}
NOT_LARGE = (
    "pipegraph, auto, in processes", "pipegraph, OpenCV", "pipegraph, nvImageCodec",
    "DataLoader, Pillow", "torchdata.nodes, processes",
    "torchdata.nodes, ideal's function",
)  # fmt: skip


def hand_written(paths: Sequence[str], make_fill: Callable[[], Any]) -> HandWritten:
    """Two threads that do just the work."""
    return HandWritten(paths, make_fill, (3, SIZE, SIZE), np.float32)


@contextmanager
def pipegraph(paths: Sequence[str], backend: str, place: str = "thread") -> Iterator[Any]:
    """Crop drawn first, decoded in place, normalised in one pass after it; ``place`` is where that is done."""
    import torch

    import pipegraph as pg
    from pipegraph import operators as ops

    def samples() -> Iterator[dict[str, str]]:
        return ({"key": str(i), "path": path} for i, path in enumerate(harness.Repeat(paths)))

    graph = pg.Graph("recipe", seed=7)
    # Inline: who decodes an image reads it too.
    files = graph.add(ops.FromIterable(samples)).then(ops.Load(), backend="inline")
    images = files.then(ops.Batch(BATCH), capacity=1).then(
        ops.DecodeImage(SIZE, crop=ops.RandomResizedCrop(), flip=0.5, backend=backend),
        workers=WORKERS,
        capacity=PREFETCH,
        backend=place,
    )
    normalize = ops.Normalize(recipe.MEAN, recipe.STD, dtype=torch.float32, layout="NCHW")
    images.then(normalize, workers=WORKERS, backend=place)
    with graph.loader() as loader:
        yield (batch["image"] for batch in loader)


def contestants(paths: Sequence[str], large: bool = False) -> list[Contestant]:
    """All ways to run the recipe."""
    nodes = partial(peers.torchdata_nodes, make_batch=lambda: recipe.opencv_batch)
    loader = peers.dataloader
    streams: dict[str, Any] = {
        IDEAL: partial(hand_written, make_fill=recipe.make_opencv_fill),
        REGION: partial(hand_written, make_fill=recipe.make_region_fill),
        OURS: partial(pipegraph, backend="auto"),
        "pipegraph, auto, in processes": partial(pipegraph, backend="auto", place="process"),
        "pipegraph, OpenCV": partial(pipegraph, backend="opencv"),
        "pipegraph, nvImageCodec": partial(pipegraph, backend="nvimgcodec"),
        "DataLoader, OpenCV": partial(loader, function=recipe.opencv_crop_path, collate=recipe.collate),
        "DataLoader, Pillow": partial(loader, function=recipe.pillow_sample, collate=None),
        "torchdata.nodes, threads": partial(nodes, method="thread"),
        "torchdata.nodes, processes": partial(nodes, method="process"),
        "torchdata.nodes, ideal's function": partial(
            peers.torchdata_nodes, method="thread", make_batch=recipe.make_fast_batch
        ),
        "SPDL, OpenCV": partial(peers.spdl, function=recipe.opencv_batch),
        "SPDL, own decoder": partial(peers.spdl, function=peers.spdl_own),
        "Grain": peers.grain,
        "WebDataset": peers.webdataset,
        "DALI": peers.dali,
    }

    def entered(name: str) -> Contestant:
        warm, timed = (LARGE_WARM, LARGE_FAST.get(name, LARGE_TIMED)) if large else (WARM, TIMED)
        return Contestant(name, partial(streams[name], paths), warm, timed, BATCH)

    return [entered(name) for name in streams if not (large and name in NOT_LARGE)]


def check(contestant: Any, batches: int = 4) -> str:
    """Mean and deviation of the first batches; a wrong shape or type is an error."""
    import torch

    with contestant.stream() as stream:
        sums = []
        for batch in islice(iter(stream), batches):
            if tuple(batch.shape) != (BATCH, 3, SIZE, SIZE) or batch.dtype != torch.float32:
                raise RuntimeError(f"{contestant.name}: got {tuple(batch.shape)} {batch.dtype}")
            sums.append((batch.mean().item(), batch.std().item()))
    mean, deviation = np.mean(sums, axis=0)
    return f"mean {mean:.3f}, deviation {deviation:.3f}"


def enlarge(paths: Sequence[str], folder: Path, count: int = 48) -> list[str]:
    """``count`` photographs as 3000 x 2000 JPEGs of quality 90."""
    import cv2

    large = []
    for number, path in enumerate(paths[:count]):
        image = cv2.imread(path, cv2.IMREAD_COLOR)
        big = cv2.resize(image, (3000, 2000), interpolation=cv2.INTER_CUBIC)
        large.append(str(folder / f"{number:04d}.jpg"))
        cv2.imwrite(large[-1], big, [cv2.IMWRITE_JPEG_QUALITY, 90])
    return large


def run(paths: Sequence[str], options: Any) -> None:
    """Check, race, print, record."""
    large = options.large
    configuration = {
        "photographs": len(paths), "images": (LARGE_TIMED if large else TIMED) * BATCH, "batch": BATCH,
        "size": SIZE, "workers": WORKERS, "prefetch_batches": PREFETCH, "rounds": options.rounds, "large": large,
    }  # fmt: skip
    harness.compare(
        "image_recipe_large" if large else "image_recipe",
        LARGE_CLAIM if large else CLAIM,
        configuration,
        contestants(paths, large),
        partial(check, batches=1 if large else 4),
        [IDEAL, REGION, OURS],
        "images",
        options,
    )


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    add_images_option(parser)
    parser.add_argument("--large", action="store_true", help="with photographs enlarged to 3000 x 2000")
    options = parser.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    with tempfile.TemporaryDirectory() as folder:
        run(enlarge(paths, Path(folder)) if options.large else paths, options)


if __name__ == "__main__":
    main()
