"""The ImageNet training recipe: random resized crop to 224, flip, batches of 64, normalised float32
NCHW.

Claim: at least 1.4 times the best peer in the same run, at least 2 times DataLoader with Pillow
transforms, at least 0.95 of a hand-written loop with the same decoder. With ``--large`` (photographs
enlarged to 3000 x 2000): at least 2.5 times the best peer that decodes fully.

Each peer runs in its own best way: OpenCV's full decode with the normalisation done a batch at a time
in its workers, DALI's and SPDL's own decoders, DataLoader also with Pillow. One more row runs the hand-
written loop's own function in torchdata.nodes: what the function earns, and what the framework.

    python benchmarks/image_recipe.py --images FOLDER --rounds 5
    python benchmarks/image_recipe.py --images FOLDER --rounds 5 --large
"""

from __future__ import annotations

import random
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
from harness import Contestant
from hop_cost import shut_down
from ideal import PREFETCH, HandWritten
from image_decode import limit_threads
from images import (
    BATCH,
    ENDLESS_EPOCHS,
    SIZE,
    WORKERS,
    add_images_option,
    one_thread_each,
    photographs,
    write_shards,
)

CLAIM = ">= 1.4 x the best peer, >= 2 x DataLoader with Pillow, >= 0.95 of a hand-written loop"
LARGE_CLAIM = "3000 x 2000: >= 2.5 x the best peer that decodes fully"
IDEAL = "hand-written, OpenCV"
REGION = "hand-written, region decode"
OURS = "pipegraph, auto"
TIMED = 32
WARM = 10


def hand_written(paths: Sequence[str], make_fill: Callable[[], Any]) -> HandWritten:
    """Two threads that do just the work."""
    return HandWritten(paths, make_fill, (3, SIZE, SIZE), np.float32)


@contextmanager
def pipegraph(paths: Sequence[str], backend: str) -> Iterator[Any]:
    """Crop drawn first, decoded in place, normalised in one pass after it."""
    import torch

    import pipegraph as pg
    from pipegraph import operators as ops

    samples = ({"key": str(i), "path": path} for i, path in enumerate(harness.Repeat(paths)))
    graph = pg.Graph("recipe", seed=7)
    batches = graph.add(ops.FromIterable(samples)).then(ops.Load()).then(ops.Batch(BATCH), capacity=1)
    images = batches.then(
        ops.DecodeImage(SIZE, crop=ops.RandomResizedCrop(), flip=0.5, backend=backend),
        workers=WORKERS,
        capacity=PREFETCH,
    )
    images.then(ops.Normalize(recipe.MEAN, recipe.STD, dtype=torch.float32, layout="NCHW"), workers=WORKERS)
    with graph.loader() as loader:
        yield (batch["image"] for batch in loader)


class Samples:
    """A map-style data set: a function of a path, the photographs repeated without end in sight."""

    def __init__(self, paths: Sequence[str], function: Callable[[str], Any]) -> None:
        self.paths = paths
        self.function = function

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        return self.function(self.paths[index % len(self.paths)])


def start_worker(worker: int) -> None:
    """Threads held to one, and random numbers that differ from the other worker's."""
    limit_threads(worker)
    random.seed(worker)


@contextmanager
def dataloader(paths: Sequence[str], function: Callable[[str], Any], collate: Any) -> Iterator[Any]:
    """Two persistent worker processes, two batches ahead each."""
    from torch.utils.data import DataLoader

    data: Any = Samples(paths, function)
    loader: Any = DataLoader(
        data,
        batch_size=BATCH,
        num_workers=WORKERS,
        prefetch_factor=PREFETCH // WORKERS,
        persistent_workers=True,
        worker_init_fn=start_worker,
        collate_fn=collate,
    )
    iterator = iter(loader)
    yield iterator
    iterator._shutdown_workers()


@contextmanager
def torchdata_nodes(paths: Sequence[str], method: Any, make_batch: Callable[[], Any]) -> Iterator[Any]:
    """Batch the paths, map in the workers, prefetch."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher

    node: Any = Batcher(IterableWrapper(harness.Repeat(paths)), BATCH)
    node = ParallelMapper(node, make_batch(), num_workers=WORKERS, method=method)
    iterator = iter(Loader(Prefetcher(node, PREFETCH)))
    yield iterator
    shut_down(iterator)


@contextmanager
def spdl(paths: Sequence[str], function: Callable[[Sequence[str]], Any]) -> Iterator[Any]:
    """A batch per task."""
    from spdl.pipeline import PipelineBuilder

    empty: Any = PipelineBuilder()
    builder = empty.add_source(harness.Repeat(paths)).aggregate(BATCH)
    builder = builder.pipe(function, concurrency=WORKERS, output_order="input")
    pipeline = builder.add_sink(PREFETCH).build(num_threads=WORKERS, use_thread_output_queue=True)
    with pipeline.auto_stop(timeout=120):
        yield pipeline


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


@contextmanager
def grain(paths: Sequence[str]) -> Iterator[Any]:
    """Batched and normalised inside the two read threads."""
    import grain as gr

    data = gr.MapDataset.source(list(paths)).repeat().map(recipe.opencv_crop_path)
    batches = data.batch(BATCH, batch_fn=recipe.collate)
    options = gr.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=PREFETCH)
    iterator = iter(batches.to_iter_dataset(options))
    yield iterator
    iterator.close()


def crop_sample(sample: dict[str, Any]) -> Any:
    """A WebDataset sample to its cropped image."""
    return recipe.opencv_crop(sample["jpg"])


@contextmanager
def webdataset(paths: Sequence[str]) -> Iterator[Any]:
    """Tar shards through WebLoader: two worker processes that decode, collate and normalise."""
    import webdataset as wds

    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(paths, Path(folder), WORKERS)
        data = wds.WebDataset(shards * ENDLESS_EPOCHS, shardshuffle=False)
        data = data.map(crop_sample).batched(BATCH, collation_fn=recipe.collate)
        loader = wds.WebLoader(
            data,
            batch_size=None,
            num_workers=WORKERS,
            prefetch_factor=PREFETCH // WORKERS,
            worker_init_fn=start_worker,
        )
        iterator = iter(loader)
        yield iterator
        del iterator


@contextmanager
def dali(paths: Sequence[str]) -> Iterator[Any]:
    """Its own operators on the CPU: ``image_random_crop``, resize, crop_mirror_normalize."""
    import torch
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=PREFETCH
    )
    def definition() -> Any:
        encoded, _ = fn.readers.file(files=list(paths), prefetch_queue_depth=PREFETCH)
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

    pipeline = definition()
    pipeline.build()

    def batches() -> Iterator[Any]:
        while True:
            (images,) = pipeline.run()
            yield torch.utils.dlpack.from_dlpack(images.as_tensor())

    yield batches()


def contestants(paths: Sequence[str]) -> list[Contestant]:
    """All ways to run the recipe."""
    nodes = partial(torchdata_nodes, make_batch=lambda: recipe.opencv_batch)
    streams: dict[str, Any] = {
        IDEAL: partial(hand_written, make_fill=recipe.make_opencv_fill),
        REGION: partial(hand_written, make_fill=recipe.make_region_fill),
        OURS: partial(pipegraph, backend="auto"),
        "pipegraph, OpenCV": partial(pipegraph, backend="opencv"),
        "pipegraph, nvImageCodec": partial(pipegraph, backend="nvimgcodec"),
        "DataLoader, OpenCV": partial(dataloader, function=recipe.opencv_crop_path, collate=recipe.collate),
        "DataLoader, Pillow": partial(dataloader, function=recipe.pillow_sample, collate=None),
        "torchdata.nodes, threads": partial(nodes, method="thread"),
        "torchdata.nodes, processes": partial(nodes, method="process"),
        "torchdata.nodes, ideal's function": partial(
            torchdata_nodes, method="thread", make_batch=recipe.make_fast_batch
        ),
        "SPDL, OpenCV": partial(spdl, function=recipe.opencv_batch),
        "SPDL, own decoder": partial(spdl, function=spdl_own),
        "Grain": grain,
        "WebDataset": webdataset,
        "DALI": dali,
    }
    return [
        Contestant(name, partial(stream, paths), warm=WARM, timed=TIMED, weight=BATCH)
        for name, stream in streams.items()
    ]


def check(contestant: Contestant) -> str:
    """Mean and deviation of the first four batches; a wrong shape or type is an error."""
    import torch

    with contestant.stream() as stream:
        sums = []
        for batch in islice(iter(stream), 4):
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


def run(paths: Sequence[str], options: Any, large: bool) -> None:
    """Check, race, print, record."""
    claim = LARGE_CLAIM if large else CLAIM
    configuration = {
        "photographs": len(paths), "images": (TIMED // 8 if large else TIMED) * BATCH, "batch": BATCH,
        "size": SIZE,
        "workers": WORKERS, "prefetch_batches": PREFETCH, "rounds": options.rounds, "large": large,
    }  # fmt: skip
    entered = contestants(paths)
    if large:
        entered = [Contestant(c.name, c.stream, WARM // 5, TIMED // 8, c.weight) for c in entered]
    name = "image_recipe_large" if large else "image_recipe"
    harness.compare(name, claim, configuration, entered, check, [IDEAL, REGION, OURS], "images", options)


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    add_images_option(parser)
    parser.add_argument("--large", action="store_true", help="with photographs enlarged to 3000 x 2000")
    options = parser.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    with tempfile.TemporaryDirectory() as folder:
        run(enlarge(paths, Path(folder)) if options.large else paths, options, options.large)


if __name__ == "__main__":
    main()
