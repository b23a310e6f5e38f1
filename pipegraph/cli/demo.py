"""``pipegraph demo``: train on images, stop in the middle, resume from the saved state, show the profile.

And the files that it and the documentation's examples read: drawn shapes, and tokens. The same each time.
"""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.cli.commands import ProgressLine
from pipegraph.device.accelerator import every_device
from pipegraph.errors import DataError, PipegraphError, extra_module
from pipegraph.machine import cores

SIZE = 128
PER_CLASS = 24
TOKENS = 65_536
VOCABULARY = 512


def _polygon(corners: int, every_other: float = 1.0) -> NDArray[np.float64]:
    """The corners (corners, 2) of a regular polygon, or of a star."""
    numbers = np.arange(corners)
    angles = 2 * math.pi * numbers / corners
    radius = np.where(numbers % 2, every_other, 1.0)
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], 1)


# Where two outlines overlap nothing is drawn.
OUTLINES = {
    "circle": [_polygon(48)],
    "ring": [_polygon(48), 0.6 * _polygon(48)],
    "square": [_polygon(4)],
    "triangle": [_polygon(3)],
    "star": [_polygon(10, 0.42)],
    "cross": [_polygon(8, 0.25)],
    "bar": [_polygon(4) * (1.0, 0.25)],
    "half-moon": [_polygon(48)[:25]],
}
CLASSES = tuple(OUTLINES)


def write_shards(folder: Path, images: int, shards: int) -> None:
    """Write labelled images as tar shards ``train-000.tar`` ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard:03d}.tar", "w") as tar:
            for number in range(shard, images, shards):
                label = (number // shards) % len(CLASSES)
                _add(tar, f"{number:06d}.jpg", encoded(draw(label, np.random.default_rng([7, number]))))
                _add(tar, f"{number:06d}.cls", str(label).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _cv2() -> Any:
    return extra_module("cv2", "images", "drawing the demo's images")


def encoded(image: NDArray[np.uint8]) -> bytes:
    """The image (uint8, height x width x 3) as JPEG."""
    return bytes(_cv2().imencode(".jpg", image)[1])


def draw(label: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One shape on a noisy ground: uint8 (SIZE, SIZE, 3), its colour, place, size and angle drawn by ``rng``."""
    cv2 = _cv2()
    ground, colour = rng.integers(0, 256, (2, 3))
    if np.abs(colour - ground).sum() < 250:
        colour = (ground + 128) % 256
    image: NDArray[np.uint8] = np.clip(ground + rng.normal(0, 8, (SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
    radius, angle = rng.uniform(0.28, 0.44) * SIZE, rng.uniform(0, 2 * math.pi)
    center = rng.uniform(radius, SIZE - radius, 2)
    turn = radius * np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    outlines = [np.round(center + outline @ turn).astype(np.int32) for outline in OUTLINES[CLASSES[label]]]
    cv2.fillPoly(image, outlines, colour.tolist(), cv2.LINE_AA)
    return image


def make_files(folder: str) -> list[str]:
    """Draw the examples' files into ``folder``; returns a line for each kind."""
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise DataError(f"--make {folder!r}: a file of that name exists; name a folder")
    write_shards(root / "data", 512, 2)
    for label, name in enumerate(CLASSES):
        (root / "photos" / name).mkdir(parents=True, exist_ok=True)
        for number in range(PER_CLASS):
            image = draw(label, np.random.default_rng([11, label, number]))
            (root / "photos" / name / f"{number:02d}.jpg").write_bytes(encoded(image))
    # Text that a model can learn: each token mostly follows from the one before.
    (root / "tokens").mkdir(exist_ok=True)
    steps = np.random.default_rng(13).integers(0, 7, TOKENS) * 3 + 1
    (np.cumsum(steps) % VOCABULARY).astype(np.uint16).tofile(root / "tokens" / "train.bin")
    return [
        f"{root}/data/train-{{000..001}}.tar: 512 labelled JPEG images in 2 tar shards",
        f"{root}/photos: {len(CLASSES) * PER_CLASS} JPEG files in {len(CLASSES)} class folders",
        f"{root}/tokens/train.bin: {TOKENS:,} tokens as uint16, below {VOCABULARY}",
    ]


SEED = 7
IMAGES, SHARDS = 1600, 8
"""Of the images that are drawn where no data is given."""

BATCH = 32
MIN_STEPS = 8
"""Steps per epoch that a small folder still gets, by smaller batches."""

SAMPLES_IN_ALL = 12800
MAX_EPOCHS = 12
STOP_WITHIN = 300
"""The stop in the middle comes after this many steps at the latest."""

IMAGE_SIZE = 64
WIDTHS = (3, 16, 32, 64, 96)
OUTPUTS = 1000
"""Of the network, whatever the data: shards do not say how many classes they have. Labels are taken modulo this."""


def run_demo(path: str | None, epochs: int | None, images: int = IMAGES) -> None:
    """See ``pipegraph demo --help``."""
    # Two threads of torch and two of the decoder on two cores would wait for each other's time slices:
    # OpenMP spins at its barriers, and on a busy machine nearly all speed is lost.
    torch.set_num_threads(max(1, int(cores()) // 2))
    with ProgressLine() as progress, tempfile.TemporaryDirectory(prefix="pipegraph-demo-") as folder:
        if path is None:
            path = f"{folder}/images"
            progress.say(f"drawing {images:,} images of shapes")
            write_shards(Path(path), images, SHARDS)
        data = find_data(path)
        if epochs is None:
            epochs = min(MAX_EPOCHS, max(3, SAMPLES_IN_ALL // data.samples))
        profile = DemoJob(data, epochs, progress, Path(folder) / "checkpoint.pt").run()
    print()
    print(profile)


@dataclass(frozen=True)
class DataSet:
    """Images to train on; ``source`` says which comes next."""

    what: str
    source: Any
    samples: int

    def graph(self, batch: int, devices: list[torch.device]) -> pg.Graph:
        """shard-select (or list-files) -> load -> batch -> decode -> pin -> copy -> scatter."""
        graph = pg.Graph("demo", seed=SEED)
        # Broken files are left out and listed in the profile.
        node = graph.add(self.source, name="select")
        node = node.then(ops.Load(), name="load", workers=2, on_error=pg.Skip())
        node = node.then(ops.Batch(batch), name="batch")
        decode = ops.DecodeImage(IMAGE_SIZE, crop=ops.RandomResizedCrop(scale=(0.8, 1.0)), flip=0.5)
        node = node.then(decode, name="decode", workers=max(2, int(cores())), on_error=pg.Skip())
        node = node.then(ops.Pin(), name="pin")
        node = node.then(ops.CopyToDevice(devices[0]), name="copy")
        node.then(ops.Scatter(devices), name="scatter")
        return graph


def find_data(path: str) -> DataSet:
    """What lies at ``path``: a folder of class folders, a flat folder of images, or tar shards."""
    folder = Path(path)
    if folder.is_dir() and not any(folder.glob("*.tar")):
        listed = ops.ListFiles(path, shuffle=True)
        classes = len(listed.classes)
        what = f"folder of {classes} class folders" if classes else "flat folder of images"
        return DataSet(what, listed, len(listed.files()))
    if os.path.isfile(path) and not path.endswith(".tar"):
        raise DataError(f"DATA={path!r} is neither a folder nor tar shards")
    shards = ops.ShardSelect(path)
    manifest = shards.manifest()
    return DataSet(f"{len(manifest.parts)} tar shards", shards, len(manifest))


class DemoJob:
    """One demo run over ``data``."""

    def __init__(self, data: DataSet, epochs: int, progress: ProgressLine, checkpoint: Path) -> None:
        self.data = data
        self.epochs = epochs
        self.progress = progress
        self.checkpoint = checkpoint
        self.devices = every_device()
        self.batch = max(1, min(BATCH, data.samples // MIN_STEPS))
        self.steps = -(-data.samples // self.batch)
        self.stop_at = max(1, min(STOP_WITHIN, epochs // 2 * self.steps + self.steps // 2))
        self.seen: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(epochs)]

    def run(self) -> pg.Profile:
        """Train, stop, resume, check; returns the profile of the resumed loader."""
        say = self.progress.say
        places = ", ".join(map(str, self.devices))
        say(f"{self.data.what}: {self.data.samples:,} images, batches of {self.batch}, on {places}")
        say("learning the images' labels, or where they have none which colour is the strongest in each")
        say(str(self.data.graph(self.batch, self.devices).plan()))
        if self.epochs * self.steps > 1:
            self._train(stop=True)
        profile = self._train(stop=False)
        self._check_epochs(len({entry.key for entry in profile.quarantined}))
        return profile

    def _train(self, stop: bool) -> pg.Profile:
        """Train from the checkpoint, if there is one, to the stop in the middle or to the end."""
        torch.manual_seed(SEED)
        model = Classifier().to(self.devices[0])
        optimizer = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
        with (
            self.data.graph(self.batch, self.devices).loader(epochs=self.epochs) as loader,
            pg.ReplicaExecutor(model, self.devices, optimizer=optimizer) as executor,
        ):
            done = self._resume(loader, executor) if self.checkpoint.exists() else 0
            while loader.epoch < self.epochs:
                epoch, losses = loader.epoch, []
                name = f"epoch {epoch + 1}/{self.epochs}"
                self.progress.begin(name, self.steps, done=done % self.steps)
                for chunk in loader.chunks():
                    losses.append(float(executor.step(chunk.data, loss=loss_of).loss))
                    self.seen[epoch].append(chunk.positions)
                    done += 1
                    self.progress.reach((done - 1) % self.steps + 1, len(chunk), f"loss {losses[-1]:.3f}")
                    if stop and done == self.stop_at:
                        self._save(loader, executor, done)
                        return loader.profile()
                self.progress.say(f"{name}: mean loss {np.mean(losses):.4f}")
            return loader.profile()

    def _save(self, loader: pg.Loader, executor: pg.ReplicaExecutor, done: int) -> None:
        state = loader.state_dict()
        torch.save({"executor": executor.state_dict(), "loader": state, "step": done}, self.checkpoint)
        self.progress.say(
            f"stopped on purpose after step {done} of {self.epochs * self.steps}, inside epoch {loader.epoch + 1}; "
            f"the loader's state is {len(json.dumps(state)):,} bytes of JSON"
        )

    def _resume(self, loader: pg.Loader, executor: pg.ReplicaExecutor) -> int:
        saved = torch.load(self.checkpoint, weights_only=False)
        executor.load_state_dict(saved["executor"])
        loader.load_state_dict(saved["loader"])
        done = int(saved["step"])
        self.progress.say(
            f"resumed in a new loader, model and optimizer: continues with step {done + 1}, in epoch {loader.epoch + 1}"
        )
        return done

    def _check_epochs(self, broken: int) -> None:
        """Every sample that is not broken was delivered once in every epoch, also in the one that was broken off."""
        for epoch, parts in enumerate(self.seen, 1):
            delivered = np.concatenate(parts)
            if len(np.unique(delivered)) != len(delivered) or len(delivered) + broken != self.data.samples:
                raise PipegraphError(f"epoch {epoch} did not deliver each of its samples exactly once")
        whole = "exactly once in every epoch, also in the one that was broken off"
        self.progress.say(f"each of the {self.data.samples - broken:,} images was delivered {whole}")
        if broken:
            self.progress.say(f"{broken:,} files that are no images were left out, the profile names them")


class Classifier(nn.Sequential):
    """Names the class of an image, or where it has no label the strongest of its colours."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(WIDTHS):
            layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], OUTPUTS))

    def forward(self, part: dict[str, Any]) -> torch.Tensor:
        """(N, OUTPUTS) from the part's ``"image"``, uint8 (N, H, W, 3)."""
        images = part["image"].permute(0, 3, 1, 2).float().div(127.5).sub(1)
        named: torch.Tensor = super().forward(images)  # type: ignore[no-untyped-call]
        return named


def loss_of(outputs: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
    """Mean cross entropy."""
    wanted = part["label"] if "label" in part else part["image"].float().mean((1, 2)).argmax(1)
    return F.cross_entropy(outputs, wanted.remainder(OUTPUTS))
