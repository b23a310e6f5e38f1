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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import harness
import numpy as np
import peers
from harness import Contestant
from ideal import HandWritten
from images import (
    BATCH,
    SIZE,
    WORKERS,
    add_images_option,
    decode,
    load,
    one_thread_each,
    photographs,
)
from peers import PREFETCH, Samples, start_worker

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


def dataloader(paths: Sequence[str]) -> Any:
    """Two batches ahead for each worker."""
    options = {"batch_size": BATCH, "worker_init_fn": start_worker}
    return peers.dataloader(Samples(paths, load), PREFETCH, WORKERS, **options)


def load_batch(paths: Sequence[str]) -> Any:
    """A batch of paths to one uint8 tensor, each image written once into its place."""
    import torch

    images = np.empty((len(paths), SIZE, SIZE, 3), np.uint8)
    for row, path in enumerate(paths):
        fill(path, images[row])
    return torch.from_numpy(images)


def torchdata_nodes(paths: Sequence[str], method: str) -> Any:
    """A batch per task."""
    return peers.nodes(harness.Repeat(paths), load_batch, method, BATCH, READY, WORKERS)


def spdl(paths: Sequence[str], function: Any, collate: Any = None) -> Any:
    """A batch per task, or with ``collate`` an image."""
    return peers.spdl(harness.Repeat(paths), function, BATCH, READY, WORKERS, collate=collate)


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


def grain(paths: Sequence[str]) -> Any:
    """Batched before the read threads, so that each of the two reads whole batches."""
    from grain import MapDataset

    return peers.grain(MapDataset.source(list(paths)).repeat().map(load).batch(BATCH), PREFETCH, WORKERS)


def decode_sample(sample: dict[str, Any]) -> Any:
    """A WebDataset sample to its image."""
    return decode(sample["jpg"])


def webdataset(paths: Sequence[str]) -> Any:
    """Decoded and collated by two worker processes."""
    from torch.utils.data import default_collate

    return peers.webdataset(paths, decode_sample, default_collate, BATCH, PREFETCH, WORKERS)


def dali(paths: Sequence[str]) -> Any:
    """Its own decoder and resize."""

    def steps(fn: Any, types: Any, encoded: Any) -> Any:
        images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        return fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=False)

    return peers.dali(paths, steps, BATCH, PREFETCH, WORKERS)


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
        "SPDL, per image": partial(spdl, function=load, collate=stack),
        "SPDL, per batch": partial(spdl, function=load_batch),
        "SPDL, own decoder": partial(spdl, function=spdl_load_batch),
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
