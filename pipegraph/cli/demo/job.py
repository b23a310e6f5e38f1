"""The demo's job: train, stop in the middle, resume from the saved state, show the profile."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import convert_conv2d_weight_memory_format

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.cli.demo.shapes import CLASSES, IMAGES, shapes_folder
from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.device.opening import every_device
from pipegraph.errors import DataError, PipegraphError
from pipegraph.machine import cores
from pipegraph.operators.images.crop import RandomResizedCrop
from pipegraph.order import LaneOrder, StridedOrder

BATCH = 32
MIN_STEPS = 8
"""Steps per epoch that a small folder still gets, by smaller batches."""

SAMPLES_IN_ALL = 12800
MAX_EPOCHS = 12
STOP_WITHIN = 300
"""The stop in the middle comes after this many steps at the latest."""


def run_demo(path: str | None, epochs: int | None, images: int = IMAGES) -> None:
    """See ``pipegraph demo --help``."""
    # Two threads of torch and two of the decoder on two cores would wait for each other's time slices:
    # OpenMP spins at its barriers, and on a busy machine nearly all speed is lost.
    torch.set_num_threads(max(1, int(cores()) // 2))
    with ProgressLine("") as progress:
        data = (
            own_images(str(shapes_folder(progress.say, images)), images) if path is None else find_data(path)
        )
        if epochs is None:
            epochs = min(MAX_EPOCHS, max(3, SAMPLES_IN_ALL // data.samples))
        profile = DemoJob(data, epochs, progress).run()
    print()
    print(profile)


class DemoJob:
    """One demo run over ``data``."""

    def __init__(self, data: DataSet, epochs: int, progress: ProgressLine) -> None:
        self.data = data
        self.epochs = epochs
        self.progress = progress
        self.devices = every_device()
        self.batch = max(1, min(BATCH, data.samples // MIN_STEPS))
        self.steps = -(-data.samples // self.batch)
        self.stop_at = max(1, min(STOP_WITHIN, epochs // 2 * self.steps + self.steps // 2))
        self.seen: dict[int, list[np.ndarray[Any, Any]]] = {}
        self.losses: dict[int, list[float]] = {}

    def run(self) -> pg.Profile:
        """Train, stop, resume, check; returns the profile of the resumed loader."""
        say = self.progress.say
        places = ", ".join(map(str, self.devices))
        say(f"{self.data.what}: {self.data.samples:,} images, batches of {self.batch}, on {places}")
        if not self.data.classes:
            say("no classes here, so the network learns which colour is the strongest in an image")
        say(str(self.data.graph(self.batch, self.devices).plan()))
        with tempfile.TemporaryDirectory(prefix="pipegraph-demo-") as folder:
            checkpoint = Path(folder) / "checkpoint.pt"
            if self.epochs * self.steps > 1:
                self._train(checkpoint, stop=True)
            profile = self._train(checkpoint, stop=False)
        self._check_epochs(len({entry.key for entry in profile.quarantined}))
        return profile

    def _executor(self) -> pg.ReplicaExecutor:
        torch.manual_seed(SEED)
        model = Classifier(self.data.classes).to(self.devices[0])
        optimizer = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
        return pg.ReplicaExecutor(model, self.devices, optimizer=optimizer)

    def _train(self, checkpoint: Path, stop: bool) -> pg.Profile:
        """Train from the checkpoint, if there is one, to the stop in the middle or to the end."""
        graph = self.data.graph(self.batch, self.devices)
        with graph.loader(epochs=self.epochs) as loader, self._executor() as executor:
            done = self._resume(checkpoint, loader, executor) if checkpoint.exists() else 0
            while loader.epoch < self.epochs:
                epoch = loader.epoch
                self.progress.start(f"epoch {epoch + 1}/{self.epochs}", self.steps, done=done % self.steps)
                for chunk in loader.chunks():
                    loss = self._step(executor, chunk)
                    done += 1
                    self.progress.advance((done - 1) % self.steps + 1, len(chunk), f"loss {loss:.3f}")
                    if stop and done == self.stop_at:
                        self._save(checkpoint, loader, executor, done)
                        return loader.profile()
                mean = float(np.mean(self.losses[epoch]))
                self.progress.say(f"epoch {epoch + 1}/{self.epochs}: mean loss {mean:.4f}")
            return loader.profile()

    def _step(self, executor: pg.ReplicaExecutor, chunk: pg.Chunk) -> float:
        model: Any = executor.module
        loss = float(executor.step(chunk.data, loss=model.loss).loss)
        self.losses.setdefault(chunk.epoch, []).append(loss)
        self.seen.setdefault(chunk.epoch, []).append(chunk.positions)
        return loss

    def _save(self, checkpoint: Path, loader: pg.Loader, executor: pg.ReplicaExecutor, done: int) -> None:
        state = loader.state_dict()
        torch.save({"executor": executor.state_dict(), "loader": state, "step": done}, checkpoint)
        size = len(json.dumps(state))
        self.progress.say(
            f"stopped on purpose after step {done} of {self.epochs * self.steps}, inside epoch {loader.epoch + 1}; "
            f"the loader's state is {size:,} bytes of JSON"
        )

    def _resume(self, checkpoint: Path, loader: pg.Loader, executor: pg.ReplicaExecutor) -> int:
        saved = torch.load(checkpoint, weights_only=False)
        executor.load_state_dict(saved["executor"])
        loader.load_state_dict(saved["loader"])
        done = int(saved["step"])
        self.progress.say(
            f"resumed in a new loader, model and optimizer: continues with step {done + 1}, in epoch {loader.epoch + 1}"
        )
        return done

    def _check_epochs(self, broken: int) -> None:
        """Every sample of every epoch that is not broken was delivered once, also in the one that was broken off."""
        for epoch, parts in self.seen.items():
            delivered = np.concatenate(parts)
            if len(np.unique(delivered)) != len(delivered) or len(delivered) + broken != self.data.samples:
                raise PipegraphError(f"epoch {epoch + 1} did not deliver each of its samples exactly once")
        whole = "exactly once in every epoch, also in the one that was broken off"
        self.progress.say(f"each of the {self.data.samples - broken:,} images was delivered {whole}")
        if broken:
            self.progress.say(f"{broken:,} files that are no images were left out, the profile names them")


WIDTHS = (16, 32, 64, 96)


def _encoder() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        layers += [
            nn.Conv2d(channels, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    # Images come as NHWC: kept that way, no layer has to turn them.
    encoder = nn.Sequential(*layers)
    convert_conv2d_weight_memory_format(encoder, torch.channels_last)
    return encoder


def _floats(images_NHWC: torch.Tensor) -> torch.Tensor:
    """uint8 (N, H, W, 3) to float32 (N, 3, H, W) in -1..1."""
    return images_NHWC.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


class Classifier(nn.Module):
    """Names the class of an image; with 0 ``classes``, the strongest of its colours."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.labelled = classes > 0
        self.encoder = _encoder()
        self.head = nn.Linear(2 * WIDTHS[-1], classes or 3)

    def forward(self, part: dict[str, Any]) -> torch.Tensor:
        """(N, classes) from the part's ``"image"``, uint8 (N, H, W, 3)."""
        features = self.encoder(_floats(part["image"]))
        pooled = torch.cat([features.mean((2, 3)), features.amax((2, 3))], 1)
        named: torch.Tensor = self.head(pooled)
        return named

    def loss(self, outputs: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
        """Mean cross entropy."""
        wanted = part["label"] if self.labelled else part["image"].float().mean((1, 2)).argmax(1)
        return F.cross_entropy(outputs, wanted.remainder(outputs.shape[1]))


IMAGE_SIZE = 64
FOREIGN_CLASSES = 1000
"""Classes of labelled shards that say nothing of their number: labels are taken modulo this."""

SEED = 7


@dataclass(frozen=True)
class DataSet:
    """Images to train on.

    Attributes:
        what: for the reader.
        path: a folder of images, or shards as ``ShardSelect`` takes them.
        shards: which of the two.
        samples: how many there are.
        classes: how many, or 0 without labels.
        own: whether these are the demo's own images, which cannot be broken.
    """

    what: str
    path: str
    shards: bool
    samples: int
    classes: int
    own: bool = False

    def source(self) -> Any:
        """The operator that says which sample comes next, shuffled."""
        if self.shards:
            return ops.ShardSelect(self.path, order=LaneOrder())
        return ops.ListFiles(self.path, order=StridedOrder(shuffle=True))

    def graph(self, batch: int, devices: list[torch.device]) -> pg.Graph:
        """shard-select (or list-files) -> load -> batch -> decode -> pin -> copy -> scatter."""
        graph = pg.Graph("demo", seed=SEED)
        # Broken files of a user's own folder are left out and listed in the profile.
        on_error = "raise" if self.own else pg.Skip()
        node = graph.add(self.source(), name="select")
        node = node.then(ops.Load(), name="load", workers=2, on_error=on_error)
        node = node.then(ops.Batch(batch), name="batch")
        decode = ops.DecodeImage(IMAGE_SIZE, crop=RandomResizedCrop(scale=(0.8, 1.0)), flip=0.5)
        node = node.then(decode, name="decode", workers=max(2, int(cores())), on_error=on_error)
        node = node.then(ops.Pin(), name="pin")
        node = node.then(ops.CopyToDevice(devices[0]), name="copy")
        node.then(ops.Scatter(devices), name="scatter")
        return graph


def own_images(folder: str, samples: int) -> DataSet:
    """The drawn shapes."""
    return DataSet(f"drawn shapes in tar shards in {folder}", folder, True, samples, len(CLASSES), own=True)


def find_data(path: str) -> DataSet:
    """What lies at ``path``."""
    if os.path.isdir(path) and not _holds_shards(path):
        source = ops.ListFiles(path)
        files = source.files()
        classes = len(files.classes)
        what = f"folder of {classes} class folders" if classes else "flat folder of images"
        return DataSet(what, path, False, len(files), classes)
    if os.path.isfile(path) and not path.endswith(".tar"):
        raise DataError(f"DATA={path!r} is neither a folder nor tar shards")
    manifest = ops.ShardSelect(path).manifest()
    first = _first_sample(path)
    labelled = isinstance(first.get("label"), int)
    what = f"{len(manifest.parts)} tar shards" + (" with labels" if labelled else " without labels")
    return DataSet(what, path, True, len(manifest), FOREIGN_CLASSES if labelled else 0)


def _holds_shards(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(".tar") and entry.is_file() for entry in entries)


def _first_sample(parts: str) -> dict[str, Any]:
    graph = pg.Graph("first sample")
    graph.add(ops.ShardSelect(parts, order=LaneOrder(shuffle=False))).then(ops.Load())
    with graph.loader() as loader:
        for sample in loader:
            found: dict[str, Any] = sample
            return found
    raise DataError(f"DATA={parts!r}: there is no sample in these shards")
