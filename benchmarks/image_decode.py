"""Decode photographs to 224 x 224: the same OpenCV function everywhere, 2 workers, batches of 64, steady state.

Claim: at least 0.97 of the hand-written loop, and ahead of every peer.

A run delivers 2,000 images (the folder's photographs over and over) after a warm-up of 640. Each peer does it in the
way its documentation recommends for speed; DALI uses its own reader and decoder, WebDataset reads tar shards. Before
the race every contestant's first batch is compared with the reference.

    python benchmarks/image_decode.py --images FOLDER --rounds 5
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import harness
import numpy as np
import peers
from harness import Contestant, Repeat, loaded
from ideal import hand_written
from images import BATCH, SIZE, WORKERS, decode, files, load, one_thread_each, photographs
from peers import PREFETCH, Samples, start_worker

CLAIM = ">= 0.97 of a hand-written two-thread loop, and ahead of every peer"
IDEAL = "hand-written loop"
OURS = "pipegraph: batch, DecodeImage"
DATALOADER = "DataLoader, processes"
TIMED = 32  # batches: 2,048 images
WARM = 10


def fill(path: str, row: Any) -> None:
    """Read, decode, and resize into the place."""
    import cv2

    with open(path, "rb") as file:
        data = np.frombuffer(file.read(), np.uint8)
    image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
    cv2.resize(image, (SIZE, SIZE), dst=row, interpolation=cv2.INTER_LINEAR)


def load_batch(paths: Sequence[str]) -> Any:
    """A batch of paths to one uint8 tensor, each image written once into its place."""
    import torch

    images = np.empty((len(paths), SIZE, SIZE, 3), np.uint8)
    for row, path in enumerate(paths):
        fill(path, images[row])
    return torch.from_numpy(images)


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


def decode_sample(sample: dict[str, Any]) -> Any:
    """A WebDataset sample to its image."""
    return decode(sample["jpg"])


def dali_steps(fn: Any, types: Any, encoded: Any) -> Any:
    """DALI's own decoder and resize."""
    images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    return fn.resize(images, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR, antialias=False)


def contestants(
    paths: Sequence[str], workers: int = WORKERS, ahead: int = PREFETCH, ready: int = PREFETCH
) -> list[Contestant]:
    """All ways to do the job; ``ahead``: batches in work and made, where one sets that; ``ready``: made and waiting."""
    endless = Repeat(paths)

    def in_place() -> Any:
        """Encoded samples are batched, then decoded in place into the batch's slab."""
        import pipegraph as pg
        from pipegraph import operators as ops

        batches = files(pg.Graph("decode"), paths).then(ops.Batch(BATCH), capacity=1)
        images = batches.then(ops.DecodeImage(SIZE, backend="opencv"), workers=workers, capacity=ready)
        return loaded(images, "image")

    def functions(first: Any, second: Any) -> Any:
        """A function on every path, then a batch; or, as suits torchdata.nodes and SPDL best, the other way."""
        import pipegraph as pg
        from pipegraph import operators as ops

        node = pg.Graph("decode").add(ops.FromIterable(endless))
        for function in (first, second):
            batch = function is None
            operator = ops.Batch(BATCH) if batch else ops.Map(function)
            capacity = BATCH if function is load else ready
            node = node.then(operator, workers=1 if batch else workers, capacity=capacity)
        return loaded(node)

    def dataloader() -> Any:
        data = Samples(paths, load)
        return peers.dataloader(data, ahead, workers, batch_size=BATCH, worker_init_fn=start_worker)

    def nodes(method: str) -> Any:
        return peers.nodes(endless, load_batch, method, BATCH, ready, workers)

    def spdl(function: Any, collate: Any = None) -> Any:
        return peers.spdl(endless, function, BATCH, ready, workers, collate=collate)

    def grain() -> Any:
        """Batched before the read threads, so that each of the two reads whole batches."""
        from grain import MapDataset

        return peers.grain(MapDataset.source(list(paths)).repeat().map(load).batch(BATCH), ahead, workers)

    def webdataset() -> Any:
        from torch.utils.data import default_collate

        return peers.webdataset(paths, decode_sample, default_collate, BATCH, ahead, workers)

    streams: dict[str, Any] = {
        IDEAL: lambda: hand_written(paths, lambda: fill, (SIZE, SIZE, 3), np.uint8, workers, ready),
        OURS: in_place,
        "pipegraph: map, batch": lambda: functions(load, None),
        "pipegraph: batch, map": lambda: functions(None, load_batch),
        DATALOADER: dataloader,
        "torchdata.nodes, threads": lambda: nodes("thread"),
        "torchdata.nodes, processes": lambda: nodes("process"),
        "SPDL, per image": lambda: spdl(load, stack),
        "SPDL, per batch": lambda: spdl(load_batch),
        "SPDL, own decoder": lambda: spdl(spdl_load_batch),
        "Grain, read threads": grain,
        "WebDataset, processes": webdataset,
        "DALI, own decoder": lambda: peers.dali(paths, dali_steps, BATCH, ahead, workers),
    }
    return [Contestant(name, stream, WARM, TIMED, BATCH) for name, stream in streams.items()]


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
    options = harness.arguments(__doc__, images=True).parse_args()
    paths = photographs(options.images)
    one_thread_each()
    configuration = {
        "photographs": len(paths), "images": TIMED * BATCH, "batch": BATCH, "size": SIZE, "workers": WORKERS,
        "prefetch_batches": PREFETCH,
    }  # fmt: skip
    same = partial(check, reference=load_batch(list(islice(Repeat(paths), BATCH))))
    harness.compare("image_decode", CLAIM, configuration, contestants(paths), same, [IDEAL, OURS], options)


if __name__ == "__main__":
    main()
