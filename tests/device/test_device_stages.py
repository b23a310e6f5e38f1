"""Decode, normalise, pin, copy and scatter inside a running pipeline: right numbers, and no slab too many."""

from __future__ import annotations

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


def images(count: int, batch: int, stages: int = 1) -> tuple[pg.Graph, pg.Node]:
    """Batches whose every pixel is the position of its sample modulo 256."""
    graph = pg.Graph("images")
    rows = [
        {"image": torch.full((2, 3, 3), i % 256, dtype=torch.uint8), "label": i, "key": f"k{i}"}
        for i in range(count)
    ]
    return graph, graph.add(ops.FromSequence(rows), capacity=16).then(ops.Batch(batch))


def test_a_stage_behind_a_copy_sees_it_finished():
    graph, batches = images(400, 4)
    seen = batches.then(ops.CopyToDevice("cpu", copy=True)).then(lambda batch: batch["image"].sum().item())
    sums = [sum((i % 256) * 18 for i in range(4 * s, 4 * s + 4)) for s in range(100)]
    with graph.loader(seen) as loader:
        assert list(loader) == sums


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
