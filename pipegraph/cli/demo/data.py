"""Reads what DATA= names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.cli.demo.shapes import CLASSES
from pipegraph.errors import DataError
from pipegraph.machine import cores
from pipegraph.operators.images.crop import RandomResizedCrop
from pipegraph.order import LaneOrder, StridedOrder

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
