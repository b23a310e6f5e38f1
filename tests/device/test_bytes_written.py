"""What a batch costs the host from decode to the copy: each byte written once, and no memory that was not there before."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from channel_states import wait_until

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


def test_1000_batches_take_no_more_slabs_than_can_be_in_use_at_once():
    """The consumer takes one when all queues are full: where it is late, spare slabs are given up, and made again."""
    with graph_of(1_020 * BATCH, ops.CopyToDevice("cpu", copy=True)).loader() as loader:
        for step, _ in enumerate(loader):
            if step == 1_000:
                break
            wait_until(loader._crew.run.terminal, lambda stats: stats.putters_waiting == 1)
        found = {name: stage.counters for name, stage in loader.profile().stages.items()}
    # Two in the queue, one opened by each worker, one on its way into the queue and one out of it, three that copies
    # under way read, and one for jitter.
    assert found["decode"]["slabs_made"] <= 10
    # Two in the queue, one on its way into it and one out of it, one delivered and the one before, one for jitter.
    assert found["copy"]["slabs_made"] <= 7


def faults_per_batch(size: int, batch: int) -> float:
    """Pages of fresh memory per batch in the steady state."""
    import resource

    warm, timed = 30, 60
    encoded = [jpeg(seed) for seed in range(8)]
    rows = [{"jpg": encoded[i % 8], "label": i} for i in range(batch * (warm + timed))]
    node = pg.Graph().add(ops.FromSequence(rows)).then(ops.Batch(batch))
    node = node.then(ops.DecodeImage(size, backend="pillow"), workers=2, capacity=2)
    node = node.then(ops.CopyToDevice("cpu", copy=True))
    faults = []
    with node.graph.loader() as loader:
        for _ in loader:
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return (faults[-1] - faults[warm]) / (len(faults) - 1 - warm)


def child(size: int, batch: int) -> None:
    """Prints the faults per batch as it is, and with slabs that are never used again."""
    import ctypes

    from pipegraph.device.slabs import SlabRing

    # Anything from 128 KiB on is then fresh memory from the system each time, and shows as page faults.
    ctypes.CDLL(None).mallopt(-3, 128 * 1024)
    steady = faults_per_batch(size, batch)
    SlabRing.take = lambda self, nbytes, writer=None: self._allocate(nbytes)
    print(json.dumps([steady, faults_per_batch(size, batch)]))


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads page faults as Linux and glibc have them"
)
def test_the_system_sees_no_slab_allocated_per_batch(programs):
    """Not by our own counters: fresh memory must be faulted in, page by page, whoever allocates it."""
    size, batch = 96, 16
    pages = size * size * 3 * batch / 4096
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as t; t.child({size}, {batch})"
    done = programs.run(code)
    assert done.returncode == 0, done.stderr
    steady, without = json.loads(done.stdout.splitlines()[-1])
    assert steady < pages / 4
    assert without > 1.5 * pages  # a slab on the host and one on the device: they would have shown
