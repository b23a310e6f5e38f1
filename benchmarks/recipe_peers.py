"""The peers of the ImageNet training recipe, each in its own best way."""

from __future__ import annotations

import io
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import harness
import numpy as np
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


@cache
def torchvision_transforms() -> Any:
    """Its v2 transforms, on uint8 tensors, as its documentation recommends for speed."""
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])


def torchvision_sample(path: str) -> Any:
    """torchvision's own decoder and transforms: uint8 (3, SIZE, SIZE)."""
    from torchvision.io import ImageReadMode, decode_image

    return torchvision_transforms()(decode_image(path, ImageReadMode.RGB))


def torchvision_collate(images: Sequence[Any]) -> Any:
    """Normalised a batch at a time, which is faster than its ``Normalize`` image by image."""
    import torch

    return recipe.normalise_planes(torch.stack(list(images)))


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


@contextmanager
def ffcv(paths: Sequence[str]) -> Iterator[Any]:
    """Its own file format with the photographs' JPEG bytes as they are, its own decoder, compiled transforms.

    The epoch is a long list of indices, so that no epoch ends inside the timed span. What it delivers lies in
    memory as NHWC, its own best layout; everyone else delivers NCHW.
    """
    import torch
    from ffcv.fields import RGBImageField
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from PIL import Image

    class Encoded(RGBImageField):  # type: ignore[misc]
        """JPEG bytes are stored unchanged; its own field would decode and compress them anew."""

        def encode(self, destination: Any, image: Any, malloc: Any) -> None:
            data = np.frombuffer(image, np.uint8)
            with Image.open(io.BytesIO(image)) as header:
                destination["width"], destination["height"] = header.size
            destination["mode"] = 0  # JPEG
            destination["data_ptr"], storage = malloc(data.nbytes)
            storage[:] = data

    class Files:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> tuple[bytes]:
            return (rgb_jpeg(paths[index]),)

    mean, std = (255 * np.array(values) for values in (recipe.MEAN, recipe.STD))
    steps = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    steps += [NormalizeImage(mean, std, np.float32), ToTensor(), ToTorchImage()]
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "photographs.beton")
        DatasetWriter(target, {"image": Encoded(write_mode="jpg")}, num_workers=1).from_indexed_dataset(
            Files()
        )
        loader = Loader(
            target,
            batch_size=BATCH,
            num_workers=WORKERS,
            batches_ahead=PREFETCH,
            os_cache=True,
            order=OrderOption.RANDOM,
            indices=np.tile(np.arange(len(paths)), 500),
            drop_last=True,
            pipelines={"image": steps},
            custom_fields={"image": Encoded},
        )
        iterator = iter(loader)
        yield (images for (images,) in iterator)
        iterator.close()
        del iterator, loader
        torch.set_num_threads(1)


def rgb_jpeg(path: str) -> bytes:
    """A file's bytes; those of a photograph that is not RGB (FFCV's decoder takes nothing else) made anew."""
    from PIL import Image

    data = Path(path).read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        if image.mode == "RGB" and image.format == "JPEG":
            return data
        made = io.BytesIO()
        image.convert("RGB").save(made, "JPEG", quality=95)
        return made.getvalue()
