"""torchvision v2 and albumentations in a graph: the same bytes whatever the workers; the training thread's numbers stay."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

PLACES: dict[str, dict[str, Any]] = {
    "inline": {"backend": "inline"},
    "1 thread": {"workers": 1},
    "2 threads": {"workers": 2},
    "4 threads": {"workers": 4},
    "2 processes": {"workers": 2, "backend": "process"},
}


def images(count: int = 24) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"image": rng.integers(0, 256, (48, 64, 3), np.uint8), "id": i} for i in range(count)]


def run(fn: Callable[..., Any], place: dict[str, Any], model: torch.nn.Module | None = None) -> Any:
    """Two epochs of batches, and what a dropout layer in the training thread made meanwhile."""
    graph = pg.Graph("augment", seed=3)
    graph.add(ops.FromSequence(images(), shuffle=True)).then(fn, name="augment", **place).then(ops.Batch(4))
    torch.manual_seed(1)
    batches, masks = [], []
    with graph.loader(epochs=2) as loader:
        for _ in range(2):
            for batch in loader:
                batches.append(batch["image"].clone())
                masks.append(torch.nn.functional.dropout(torch.ones(8)))
    return torch.stack(batches), torch.stack(masks)


def masks_without_a_loader() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.stack([torch.nn.functional.dropout(torch.ones(8)) for _ in range(12)])


def check(fn: Callable[..., Any]) -> None:
    reference, _ = run(fn, PLACES["inline"])
    assert len({image.numpy().tobytes() for image in reference.flatten(0, 1)}) == 48  # it does augment
    expected = masks_without_a_loader()
    for name, place in PLACES.items():
        made, masks = run(fn, place)
        assert torch.equal(made, reference), name
        assert torch.equal(masks, expected), name


@pytest.fixture(scope="module")
def v2() -> Any:
    """torchvision's transforms; on a torch without CUDA its compiled operators do not load, which only names them."""
    where = os.environ.get("PIPEGRAPH_TORCHVISION", "")
    if where:
        sys.path.append(where)
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision: make test-interop brings it")
    named = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            named.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its image extension does not load either
        from torchvision.transforms import v2
    return v2


@pytest.mark.slow
def test_torchvision_v2(v2: Any) -> None:
    augment = v2.Compose(
        [
            v2.RandomResizedCrop(32, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.3, 0.3, 0.3, 0.1),
            v2.RandomApply([v2.GaussianBlur(3)], p=0.5),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )

    def work(sample: dict[str, Any]) -> dict[str, Any]:
        image = torch.from_numpy(sample["image"]).permute(2, 0, 1)
        return {**sample, "image": augment(image)}

    check(work)


class Seeded:
    """A transform with generators of its own: each thread has a copy of it, which is seeded for each sample."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.local = threading.local()

    def __reduce__(self) -> Any:
        return Seeded, (self.transform,)

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if not hasattr(self.local, "transform"):
            self.local.transform = copy.deepcopy(self.transform)
        self.local.transform.set_random_seed(int(rng.integers(1 << 31)))
        return {**sample, "image": self.local.transform(image=sample["image"])["image"]}


@pytest.mark.slow
def test_albumentations_with_the_sample_s_own_numbers() -> None:
    albumentations = pytest.importorskip("albumentations", reason="make test-interop brings it")
    augment = albumentations.Compose(
        [
            albumentations.RandomResizedCrop((32, 32)),
            albumentations.HorizontalFlip(),
            albumentations.ColorJitter(),
            albumentations.GaussianBlur(),
        ]
    )
    check(Seeded(augment))
