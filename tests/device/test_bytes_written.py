"""What a batch costs the host from decode to the copy: each byte written once, and no memory that was not there before."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import torch

import pipegraph as pg
from pipegraph import operators as ops

SIZE, BATCH = 16, 4
IMAGE, LABEL = SIZE * SIZE * 3, 8
"""Bytes of each in a delivered batch, per sample."""


def jpeg(seed: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def graph_of(count: int, *last: ops.Pin | ops.CopyToDevice | ops.Normalize) -> pg.Graph:
    encoded = [jpeg(seed) for seed in range(8)]
    rows = [{"jpg": encoded[i % 8], "label": i} for i in range(count)]
    node = pg.Graph().add(ops.FromSequence(rows)).then(ops.Batch(BATCH))
    node = node.then(ops.DecodeImage(SIZE, backend="pillow"), workers=2, capacity=2)
    for operator in last:
        node = node.then(operator)
    return node.graph


def counted(steps: int, *last: ops.Pin | ops.CopyToDevice | ops.Normalize) -> tuple[int, dict[str, Mapping[str, int]]]:  # fmt: skip
    """Bytes delivered by ``steps`` batches, and what each stage has counted."""
    delivered = 0
    with graph_of(steps * BATCH, *last).loader() as loader:
        for batch in loader:
            delivered += sum(t.nbytes for t in batch.values() if isinstance(t, torch.Tensor))
        stages = loader.profile().stages
    return delivered, {name: stage.counters for name, stage in stages.items()}


def test_from_decode_to_the_copy_every_delivered_byte_is_written_once(place: torch.device) -> None:
    # Nothing gains from a Pin before a copy to the CPU; before one to an accelerator the plan leaves it out.
    pins = [] if place.type == "cpu" else [ops.Pin()]
    delivered, found = counted(100, *pins, ops.CopyToDevice(place, copy=True))
    assert delivered == 100 * BATCH * (IMAGE + LABEL)
    written = sum(counters.get("bytes_written", 0) for counters in found.values())
    assert written / delivered == 1.0
    assert found["decode"]["bytes_written"] == 100 * BATCH * IMAGE
    assert found["copy"]["bytes_written"] == 100 * BATCH * LABEL  # laid behind the images
    assert (found["copy"]["copies"], found["copy"]["bytes_copied"]) == (100, delivered)


def test_normalised_on_the_host_floats_too_are_written_once():
    delivered, found = counted(50, ops.Normalize((0.5,) * 3, (0.25,) * 3), ops.CopyToDevice("cpu", copy=True))
    assert delivered == 50 * BATCH * (4 * IMAGE + LABEL)
    assert sum(counters.get("bytes_written", 0) for counters in found.values()) == delivered
