"""The peers of the ImageNet training recipe, each in its own best way."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import recipe
from hop_cost import shut_down
from ideal import PREFETCH
from image_decode import limit_threads
from images import BATCH, ENDLESS_EPOCHS, SIZE, WORKERS, write_shards


class Samples:
    """A map-style dataset: a function of a path, the photographs repeated without end in sight."""

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
