"""The demo's job: train, stop in the middle, resume from the saved state, show the profile."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import convert_conv2d_weight_memory_format

import pipegraph as pg
from pipegraph.cli.demo.data import SEED, DataSet, find_data, own_images
from pipegraph.cli.demo.shapes import IMAGES, shapes_folder
from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.device.opening import every_device
from pipegraph.errors import PipegraphError
from pipegraph.machine import cores

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
