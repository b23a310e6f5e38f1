"""Training on photographs from files: what a GPU gets from a loader, of what it can take.

Claim: at least 0.95 of the rate at which the GPU trains on one batch that stays there, with as many workers as there
are cores to spare; with fewer workers, faster than DataLoader.

    python benchmarks/gpu_training.py --images FOLDER --rounds 3
    python benchmarks/gpu_training.py --images FOLDER --device cpu --steps 2      # a rehearsal

ResNet-18 in bfloat16, channels last, batches of 128 crops of 224, normalised on the device. All decode with OpenCV:
pipegraph by ``DecodeImage`` in threads and in processes, DataLoader in worker processes with ``pin_memory=True`` and
copies that do not wait. Nobody waits for the device but every eighth step, as a loop that shows its loss does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
import numpy as np
import peers
import recipe
import torch
from harness import Contestant
from images import SIZE, files, one_thread_each, photographs
from peers import Samples, start_worker
from replica_parts import resnet18
from torch.nn.functional import cross_entropy

CLAIM = ">= 0.95 of the rate of a batch that stays on the GPU; with fewer workers faster than DataLoader"
BATCH, SHOWN = 128, 8


class Training:
    """Steps on a device, which is waited for at every eighth."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = resnet18().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.labels = torch.arange(BATCH, device=device)

    def step(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16):
            loss = cross_entropy(self.model(images_NCHW), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def over(self, batches: Iterator[torch.Tensor]) -> Iterator[float]:
        shown = 0.0
        for number, images in enumerate(batches, 1):
            loss = self.step(images)
            if number % SHOWN == 0:
                shown = loss.item()
            yield shown


def normalised(images_NHWC: torch.Tensor) -> torch.Tensor:
    """On the device: (N, 3, SIZE, SIZE), channels last."""
    mean = torch.tensor(recipe.MEAN, device=images_NHWC.device) * 255
    std = torch.tensor(recipe.STD, device=images_NHWC.device) * 255
    return ((images_NHWC.float() - mean) / std).permute(0, 3, 1, 2)


@contextmanager
def resident(paths: Sequence[str], device: str) -> Iterator[Any]:
    images = normalised(torch.randint(0, 256, (BATCH, SIZE, SIZE, 3), dtype=torch.uint8, device=device))
    yield Training(device).over(iter(lambda: images, None))


@contextmanager
def pipegraph(paths: Sequence[str], device: str, workers: int, place: str) -> Iterator[Any]:
    import pipegraph as pg
    from pipegraph import operators as ops

    decode = ops.DecodeImage(SIZE, crop=ops.RandomResizedCrop(), flip=0.5, backend="opencv")
    batches = files(pg.Graph("training", seed=7), paths).then(ops.Batch(BATCH), capacity=1)
    there = batches.then(decode, workers=workers, backend=place).then(ops.CopyToDevice(device))
    last = there.then(ops.Normalize(recipe.MEAN, recipe.STD, dtype=torch.float32, layout="NHWC"))
    with harness.loaded(last, "image") as images:
        yield Training(device).over(each.permute(0, 3, 1, 2) for each in images)


def stacked(images: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(images))


@contextmanager
def dataloader(paths: Sequence[str], device: str, workers: int) -> Iterator[Any]:
    options = {"batch_size": BATCH, "worker_init_fn": start_worker, "collate_fn": stacked}
    data = Samples(paths, recipe.opencv_crop_path)
    with peers.dataloader(data, 2 * workers, workers, pin_memory=device != "cpu", **options) as batches:
        yield Training(device).over(normalised(batch.to(device, non_blocking=True)) for batch in batches)


def check(contestant: Contestant) -> str:
    with contestant.stream() as stream:
        for _, _loss in zip(range(SHOWN), stream, strict=False):
            pass
        return f"loss {_loss:.2f}"


def main() -> None:
    parser = harness.arguments(__doc__, rounds=3, images=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=64, help="timed steps per round (default 64)")
    parser.add_argument(
        "--workers", nargs="+", type=int, help="numbers of workers (default: the cores but two, and 4)"
    )
    options = parser.parse_args()
    device, paths = options.device, photographs(options.images)
    one_thread_each()
    workers = options.workers or [max(1, len(os.sched_getaffinity(0)) - 2), 4]
    ways: dict[str, Callable[[], Any]] = {"resident": partial(resident, paths, device)}
    for count in workers:
        for place, name in (("thread", "threads"), ("process", "processes")):
            ways[f"pipegraph, {count} {name}"] = partial(pipegraph, paths, device, count, place)
        ways[f"DataLoader, {count} processes"] = partial(dataloader, paths, device, count)
    what = torch.cuda.get_device_name(device) if device != "cpu" else "CPU"
    harness.compare(
        "gpu_training",
        CLAIM,
        {"device": what, "batch": BATCH, "photographs": len(paths), "workers": workers},
        [Contestant(name, way, 2 * SHOWN, options.steps, BATCH) for name, way in ways.items()],
        check,
        ["resident"],
        options,
    )


if __name__ == "__main__":
    main()
