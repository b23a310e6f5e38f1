"""Decode, normalise, pin, copy and scatter inside a running pipeline: right numbers, and no slab too many."""

from __future__ import annotations

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.device.slabs import SlabRing
from pipegraph.device.split import Scattered

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def images(count: int, batch: int, stages: int = 1) -> tuple[pg.Graph, pg.Node]:
    """Batches whose every pixel is the position of its sample modulo 256."""
    graph = pg.Graph("images")
    rows = [
        {"image": torch.full((2, 3, 3), i % 256, dtype=torch.uint8), "label": i, "key": f"k{i}"}
        for i in range(count)
    ]
    return graph, graph.add(ops.FromSequence(rows), capacity=16).then(ops.Batch(batch))


def expected(label: torch.Tensor) -> torch.Tensor:
    return ((label % 256) / 255 - 0.5) / 0.25


@pytest.fixture
def poisoned(monkeypatch):
    """Slabs are filled with garbage before they are used."""
    take = SlabRing.take

    def filled(self, nbytes, writer=None):
        slab = take(self, nbytes, writer)
        return slab.fill_(0xAB) if writer is None else slab

    monkeypatch.setattr(SlabRing, "take", filled)


def test_a_stage_behind_a_copy_sees_it_finished():
    graph, batches = images(400, 4)
    seen = batches.then(ops.CopyToDevice("cpu", copy=True)).then(lambda batch: batch["image"].sum().item())
    sums = [sum((i % 256) * 18 for i in range(4 * s, 4 * s + 4)) for s in range(100)]
    with graph.loader(seen) as loader:
        assert list(loader) == sums


def test_scatter_cuts_rows_as_chunk_does_and_lists_too():
    graph, batches = images(9, 9)
    with graph.loader(batches.then(ops.Scatter(["cpu"] * 4))) as loader:
        (parts,) = list(loader)
    assert isinstance(parts, Scattered)
    assert [part["label"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [part["key"] for part in parts] == [["k0", "k1", "k2"], ["k3", "k4", "k5"], ["k6", "k7", "k8"]]


def test_scattered_copies_are_right(poisoned):
    graph, batches = images(400, 4)
    node = batches.then(ops.Normalize(MEAN, STD), workers=2).then(ops.Scatter(["cpu", "cpu"], copy=True))
    with graph.loader(node) as loader:
        for parts in loader:
            for part in parts:
                values = expected(part["label"])[:, None, None, None].expand_as(part["image"])
                assert torch.allclose(part["image"], values.float(), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ops.Scatter([]), "at least one device"),
        (lambda: ops.Scatter("cpu"), "sequence"),
        (lambda: ops.Normalize((0.5,), (0.0,)), "std"),
        (
            lambda: ops.Normalize((123.7,), (58.4,)),
            r"are of values in 0..1, .* divide those of pixels .* by 255",
        ),
        (lambda: ops.DecodeImage(0), "size must be"),
        (lambda: ops.DecodeImage(8, flip=2), "probability"),
    ],
)
def test_wrong_parameters_say_what_would_be_right(make, text):
    with pytest.raises(pg.PipegraphError, match=text):
        make()
