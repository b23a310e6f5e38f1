"""The ImageNet training recipe: random resized crop to 224, flip, batches of 64, normalised float32 NCHW.

Claim: at least 1.4 times the best peer in the same run, at least 2 times DataLoader with Pillow
transforms, at least 0.95 of a hand-written loop with the same decoder. With ``--large`` (photographs
enlarged to 3000 x 2000): at least 2.5 times the best peer that decodes fully.

Each peer runs in its own best way (``peers.py``): OpenCV's full decode with the normalisation
done a batch at a time in its workers, DALI's and SPDL's own decoders, DataLoader also with Pillow. ``--large``
leaves out what can only come behind another row there.

    python benchmarks/image_recipe.py --images FOLDER --rounds 5
    python benchmarks/image_recipe.py --images FOLDER --rounds 3 --large
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np
import peers
import recipe
from harness import Contestant, Repeat, loaded
from ideal import hand_written
from images import BATCH, SIZE, WORKERS, files, one_thread_each, photographs
from peers import PREFETCH, Samples, start_worker

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
)  # fmt: skip


def pipegraph(paths: Sequence[str], backend: str, place: str = "thread") -> Any:
    """Crop drawn first, decoded in place, normalised in one pass after it; ``place`` is where that is done."""
    import torch

    import pipegraph as pg
    from pipegraph import operators as ops

    places: Any = {"workers": WORKERS, "backend": place}
    decode = ops.DecodeImage(SIZE, crop=ops.RandomResizedCrop(), flip=0.5, backend=backend)
    normalize = ops.Normalize(recipe.MEAN, recipe.STD, dtype=torch.float32, layout="NCHW")
    batches = files(pg.Graph("recipe", seed=7), paths).then(ops.Batch(BATCH), capacity=1)
    return loaded(batches.then(decode, capacity=PREFETCH, **places).then(normalize, **places), "image")


def spdl_own(paths: Sequence[str]) -> Any:
    """SPDL's own decoder: crop, scale and flip as FFmpeg filters, planar RGB out."""
    import spdl.io

    frames = []
    for path in paths:
        packets = spdl.io.demux_image(path)
        top, left, height, width = recipe.draw_crop(packets.height, packets.width)
        flip = "hflip," if random.random() < 0.5 else ""
        filters = f"crop={width}:{height}:{left}:{top},scale={SIZE}:{SIZE}:flags=bilinear,{flip}format=rgb24"
        frames.append(spdl.io.decode_packets(packets, filter_desc=filters))
    images: Any = spdl.io.to_torch(spdl.io.convert_frames(frames))
    return recipe.normalise(images)


def crop_sample(sample: dict[str, Any]) -> Any:
    """A WebDataset sample to its cropped image."""
    return recipe.opencv_crop(sample["jpg"])


def grain(paths: Sequence[str]) -> Any:
    """Batched and normalised inside the two read threads."""
    from grain import MapDataset

    data = MapDataset.source(list(paths)).repeat().map(recipe.opencv_crop_path)
    return peers.grain(data.batch(BATCH, batch_fn=recipe.collate))


def dali(fn: Any, types: Any, encoded: Any) -> Any:
    """Its own operators: ``image_random_crop``, resize, crop_mirror_normalize."""
    images = fn.decoders.image_random_crop(
        encoded,
        device="cpu",
        output_type=types.RGB,
        random_area=[0.08, 1.0],
        random_aspect_ratio=[3 / 4, 4 / 3],
    )
    images = fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=False)
    return fn.crop_mirror_normalize(
        images,
        mirror=fn.random.coin_flip(probability=0.5),
        mean=[255 * value for value in recipe.MEAN],
        std=[255 * value for value in recipe.STD],
        dtype=types.FLOAT,
        output_layout="CHW",
    )


def contestants(paths: Sequence[str], large: bool = False) -> list[Contestant]:
    """All ways to run the recipe."""
    endless = Repeat(paths)
    nodes = partial(peers.nodes, endless, recipe.opencv_batch, batch=BATCH)

    def loader(function: Any, collate: Any) -> Any:
        options = {"batch_size": BATCH, "worker_init_fn": start_worker, "collate_fn": collate}
        return partial(peers.dataloader, Samples(paths, function), **options)

    streams: dict[str, Any] = {
        IDEAL: partial(hand_written, paths, recipe.make_opencv_fill, (3, SIZE, SIZE), np.float32),
        REGION: partial(hand_written, paths, recipe.make_region_fill, (3, SIZE, SIZE), np.float32),
        OURS: partial(pipegraph, paths, "auto"),
        "pipegraph, auto, in processes": partial(pipegraph, paths, "auto", "process"),
        "pipegraph, OpenCV": partial(pipegraph, paths, "opencv"),
        "pipegraph, nvImageCodec": partial(pipegraph, paths, "nvimgcodec"),
        "DataLoader, OpenCV": loader(recipe.opencv_crop_path, recipe.collate),
        "DataLoader, Pillow": loader(recipe.pillow_sample, None),
        "torchdata.nodes, threads": nodes,
        "torchdata.nodes, processes": partial(nodes, method="process"),
        "SPDL, OpenCV": partial(peers.spdl, endless, recipe.opencv_batch, BATCH),
        "SPDL, own decoder": partial(peers.spdl, endless, spdl_own, BATCH),
        "Grain": partial(grain, paths),
        "WebDataset": partial(peers.webdataset, paths, crop_sample, recipe.collate, BATCH),
        "DALI": partial(peers.dali, paths, dali, BATCH),
    }

    def entered(name: str) -> Contestant:
        warm, timed = (LARGE_WARM, LARGE_FAST.get(name, LARGE_TIMED)) if large else (WARM, TIMED)
        return Contestant(name, streams[name], warm, timed, BATCH)

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


def main() -> None:
    parser = harness.arguments(__doc__, images=True)
    parser.add_argument("--large", action="store_true", help="with photographs enlarged to 3000 x 2000")
    options = parser.parse_args()
    paths, large = photographs(options.images), options.large
    one_thread_each()
    with tempfile.TemporaryDirectory() as folder:
        paths = enlarge(paths, Path(folder)) if large else paths
        configuration = {
            "photographs": len(paths), "images": (LARGE_TIMED if large else TIMED) * BATCH, "batch": BATCH,
            "size": SIZE, "workers": WORKERS, "prefetch_batches": PREFETCH, "large": large,
        }  # fmt: skip
        same = partial(check, batches=1 if large else 4)
        record, claim = ("image_recipe_large", LARGE_CLAIM) if large else ("image_recipe", CLAIM)
        entered = contestants(paths, large)
        harness.compare(record, claim, configuration, entered, same, [IDEAL, REGION, OURS], options)


if __name__ == "__main__":
    main()
