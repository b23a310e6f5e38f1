"""Decode photographs to 224 x 224: the same OpenCV function everywhere, 2 workers, batches of 64,
steady state.

Claim: at least 0.97 of the hand-written loop, and ahead of every peer.

A run delivers 2,000 images (the folder's photographs over and over) after a warm-up of 640. Each peer
does it in the way its documentation recommends for speed; DALI uses its own reader and decoder,
WebDataset reads tar shards. Before the race every contestant's first batch is compared with the
reference.

    python benchmarks/image_decode.py --images FOLDER --rounds 5
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Contestant
from hop_cost import shut_down
from ideal import PREFETCH, HandWritten
from images import (
    BATCH,
    ENDLESS_EPOCHS,
    SIZE,
    WORKERS,
    add_images_option,
    decode,
    load,
    one_thread_each,
    photographs,
    write_shards,
)

CLAIM = ">= 0.97 of a hand-written two-thread loop, and ahead of every peer"
IDEAL = "hand-written loop"
OURS = "pipegraph: batch, DecodeImage"
DATALOADER = "DataLoader, processes"
TIMED = 32  # batches: 2,048 images
WARM = 10
# Batches made and waiting, where that is what one sets; elsewhere PREFETCH counts those in work too.
READY = PREFETCH


def fill(path: str, row: Any) -> None:
    """Read, decode, and resize into the place."""
    import cv2

    with open(path, "rb") as file:
        data = np.frombuffer(file.read(), np.uint8)
    cv2.resize(
        cv2.imdecode(data, cv2.IMREAD_COLOR_RGB), (SIZE, SIZE), dst=row, interpolation=cv2.INTER_LINEAR
    )


def hand_written(paths: Sequence[str]) -> HandWritten:
    """Two threads that do just the work."""
    return HandWritten(paths, lambda: fill, (SIZE, SIZE, 3), np.uint8, WORKERS, READY)


@contextmanager
def pipegraph_batch(paths: Sequence[str]) -> Iterator[Any]:
    """Encoded samples are batched, then decoded in place into the batch's slab."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("decode")
    samples = ({"key": str(i), "path": path} for i, path in enumerate(harness.Repeat(paths)))
    # Inline: who decodes an image reads it too.
    files = graph.add(ops.FromIterable(samples)).then(ops.Load(), backend="inline")
    batches = files.then(ops.Batch(BATCH), capacity=1)
    batches.then(ops.DecodeImage(SIZE, backend="opencv"), workers=WORKERS, capacity=READY)
    with graph.loader() as loader:
        yield (batch["image"] for batch in loader)


@contextmanager
def pipegraph_map(paths: Sequence[str]) -> Iterator[Any]:
    """The plain way: a function on every path, then a batch."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("decode")
    files = graph.add(ops.FromIterable(harness.Repeat(paths)))
    files.then(ops.Map(load), workers=WORKERS, capacity=BATCH).then(ops.Batch(BATCH), capacity=READY)
    with graph.loader() as loader:
        yield loader


@contextmanager
def pipegraph_batch_function(paths: Sequence[str]) -> Iterator[Any]:
    """The form that suits torchdata.nodes and SPDL best: a function on a batch of paths."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("decode")
    files = graph.add(ops.FromIterable(harness.Repeat(paths)))
    files.then(ops.Batch(BATCH), capacity=READY).then(ops.Map(load_batch), workers=WORKERS, capacity=READY)
    with graph.loader() as loader:
        yield loader


class Photographs:
    """A map-style dataset over the photographs, repeated without end in sight."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        return load(self.paths[index % len(self.paths)])


def limit_threads(worker: int) -> None:
    """A DataLoader worker's start."""
    one_thread_each()


@contextmanager
def dataloader(paths: Sequence[str]) -> Iterator[Any]:
    """Two persistent worker processes, two batches ahead each; they collate straight into shared memory."""
    from torch.utils.data import DataLoader

    data: Any = Photographs(paths)
    loader: Any = DataLoader(
        data,
        batch_size=BATCH,
        num_workers=WORKERS,
        prefetch_factor=max(1, PREFETCH // WORKERS),
        persistent_workers=True,
        worker_init_fn=limit_threads,
    )
    iterator = iter(loader)
    yield iterator
    iterator._shutdown_workers()


def load_batch(paths: Sequence[str]) -> Any:
    """A batch of paths to one uint8 tensor, each image written once into its place."""
    import torch

    images = np.empty((len(paths), SIZE, SIZE, 3), np.uint8)
    for row, path in enumerate(paths):
        fill(path, images[row])
    return torch.from_numpy(images)


@contextmanager
def torchdata_nodes(paths: Sequence[str], method: Any) -> Iterator[Any]:
    """As its migration guide does: batch the indices, map and collate in the workers, prefetch."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher

    node: Any = Batcher(IterableWrapper(harness.Repeat(paths)), BATCH)
    node = ParallelMapper(node, load_batch, num_workers=WORKERS, method=method)
    iterator = iter(Loader(Prefetcher(node, READY)))
    yield iterator
    shut_down(iterator)


@contextmanager
def spdl_items(paths: Sequence[str]) -> Iterator[Any]:
    """An image per task, then aggregated and collated."""
    from spdl.pipeline import PipelineBuilder

    empty: Any = PipelineBuilder()
    builder = empty.add_source(harness.Repeat(paths))
    builder = builder.pipe(load, concurrency=WORKERS, output_order="input").aggregate(BATCH).pipe(stack)
    pipeline = builder.add_sink(READY).build(num_threads=WORKERS, use_thread_output_queue=True)
    with pipeline.auto_stop(timeout=120):
        yield pipeline


@contextmanager
def spdl_batches(paths: Sequence[str]) -> Iterator[Any]:
    """Paths aggregated first, then a batch per task: fewer tasks for its event loop."""
    from spdl.pipeline import PipelineBuilder

    empty: Any = PipelineBuilder()
    builder = empty.add_source(harness.Repeat(paths)).aggregate(BATCH)
    builder = builder.pipe(load_batch, concurrency=WORKERS, output_order="input")
    pipeline = builder.add_sink(READY).build(num_threads=WORKERS, use_thread_output_queue=True)
    with pipeline.auto_stop(timeout=120):
        yield pipeline


@contextmanager
def spdl_own(paths: Sequence[str]) -> Iterator[Any]:
    """SPDL's own decoder and resize (FFmpeg), a batch per task."""
    from spdl.pipeline import PipelineBuilder

    empty: Any = PipelineBuilder()
    builder = empty.add_source(harness.Repeat(paths)).aggregate(BATCH)
    builder = builder.pipe(spdl_load_batch, concurrency=WORKERS, output_order="input")
    pipeline = builder.add_sink(READY).build(num_threads=WORKERS, use_thread_output_queue=True)
    with pipeline.auto_stop(timeout=120):
        yield pipeline


def spdl_load_batch(paths: Sequence[str]) -> Any:
    """``spdl.io.load_image_batch`` to one uint8 tensor; stretched, as everyone does here."""
    import spdl.io

    scale = spdl.io.get_video_filter_desc(
        scale_width=SIZE, scale_height=SIZE, scale_mode=None, scale_algo="bilinear", pix_fmt="rgb24"
    )
    buffer = spdl.io.load_image_batch(paths, width=None, height=None, filter_desc=scale)
    return spdl.io.to_torch(buffer)


def stack(images: Sequence[Any]) -> Any:
    """Collate decoded images."""
    import torch

    return torch.from_numpy(np.stack(images))


@contextmanager
def grain(paths: Sequence[str]) -> Iterator[Any]:
    """Batched before the read threads, so that each of the two reads whole batches."""
    import grain as gr
    import torch

    data = gr.MapDataset.source(list(paths)).repeat().map(load).batch(BATCH)
    options = gr.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=PREFETCH)
    iterator = iter(data.to_iter_dataset(options))
    yield (torch.from_numpy(batch) for batch in iterator)
    iterator.close()


def decode_sample(sample: dict[str, Any]) -> Any:
    """A WebDataset sample to its image."""
    return decode(sample["jpg"])


@contextmanager
def webdataset(paths: Sequence[str]) -> Iterator[Any]:
    """Tar shards through WebLoader: two worker processes that decode and collate."""
    import webdataset as wds
    from torch.utils.data import default_collate

    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(paths, Path(folder), WORKERS)
        data = wds.WebDataset(shards * ENDLESS_EPOCHS, shardshuffle=False)
        data = data.map(decode_sample).batched(BATCH, collation_fn=default_collate)
        loader = wds.WebLoader(
            data,
            batch_size=None,
            num_workers=WORKERS,
            prefetch_factor=max(1, PREFETCH // WORKERS),
            worker_init_fn=limit_threads,
        )
        iterator = iter(loader)
        yield iterator
        del iterator


@contextmanager
def dali(paths: Sequence[str]) -> Iterator[Any]:
    """Its own reader, decoder and resize on the CPU, two threads; batches leave through DLPack, uncopied."""
    import torch
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=PREFETCH
    )
    def definition() -> Any:
        encoded, _ = fn.readers.file(files=list(paths), prefetch_queue_depth=PREFETCH)
        images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        return fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=False)

    pipeline = definition()
    pipeline.build()

    def batches() -> Iterator[Any]:
        while True:
            (images,) = pipeline.run()
            yield torch.utils.dlpack.from_dlpack(images.as_tensor())

    yield batches()


def contestants(paths: Sequence[str]) -> list[Contestant]:
    """All ways to do the job."""
    streams: dict[str, Any] = {
        IDEAL: hand_written,
        OURS: pipegraph_batch,
        "pipegraph: map, batch": pipegraph_map,
        "pipegraph: batch, map": pipegraph_batch_function,
        DATALOADER: dataloader,
        "torchdata.nodes, threads": partial(torchdata_nodes, method="thread"),
        "torchdata.nodes, processes": partial(torchdata_nodes, method="process"),
        "SPDL, per image": spdl_items,
        "SPDL, per batch": spdl_batches,
        "SPDL, own decoder": spdl_own,
        "Grain, read threads": grain,
        "WebDataset, processes": webdataset,
        "DALI, own decoder": dali,
    }
    return [
        Contestant(name, partial(stream, paths), warm=WARM, timed=TIMED, weight=BATCH)
        for name, stream in streams.items()
    ]


def check(contestant: Contestant, reference: Any) -> str:
    """How the first batch compares with the reference; a wrong shape or type of the first four is an error.

    WebDataset's two shards hold the photographs in another order, so only its shape can be compared.
    """
    differences = []
    with contestant.stream() as stream:
        for batch in islice(iter(stream), 4):
            if tuple(batch.shape) != tuple(reference.shape) or batch.dtype != reference.dtype:
                raise RuntimeError(f"{contestant.name}: got {tuple(batch.shape)} {batch.dtype}")
            differences.append((batch.short() - reference.short()).abs().float().mean().item())
    return "equal" if differences[0] == 0 else f"mean difference {differences[0]:.2f}"


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    add_images_option(parser)
    options = parser.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    configuration = {
        "photographs": len(paths), "images": TIMED * BATCH, "batch": BATCH, "size": SIZE, "workers": WORKERS,
        "prefetch_batches": PREFETCH, "rounds": options.rounds,
    }  # fmt: skip
    reference = load_batch([path for _, path in zip(range(BATCH), harness.Repeat(paths), strict=False)])
    same = partial(check, reference=reference)
    harness.compare(
        "image_decode", CLAIM, configuration, contestants(paths), same, [IDEAL, OURS], "images", options
    )


if __name__ == "__main__":
    main()
