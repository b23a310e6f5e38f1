"""Many fields, one copy: how batches are packed, where they land, and who must have read them before they are overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context
from pipegraph.device.backend import Backend
from pipegraph.device.packed_copy import places_for

ROWS = 8


class Counted(Backend):
    """Notes every copy, by its bytes."""

    sizes: list[int] = []

    def copy(self, dst, src):
        Counted.sizes.append(src.numel() * src.element_size())
        super().copy(dst, src)


@pytest.fixture
def counted(monkeypatch):
    Counted.sizes = []
    monkeypatch.setattr("pipegraph.operators.to_device.backend_for", Counted)
    return Counted


def tree(step: int) -> dict[str, Any]:
    """A batch of many fields, two of them large."""
    image = torch.full((ROWS, 3, 16, 16), step, dtype=torch.float32)
    return {
        "image": image,
        "mask": (torch.arange(ROWS * 256).view(ROWS, 16, 16) + step) % 251,
        "last": image[:, :, :2, :2].contiguous(memory_format=torch.channels_last),
        "label": torch.arange(ROWS) + step,
        "half": torch.full((ROWS,), step, dtype=torch.bfloat16),
        "flag": torch.tensor([step % 2 == 0] * ROWS),
        "phase": torch.full((ROWS,), step * 1j),
        "scale": torch.tensor(float(step)),
        "none": torch.empty(ROWS, 0),
        "pair": (torch.full((ROWS, 1), step), ["words"] * ROWS),
        "key": [f"k{i}" for i in range(ROWS)],
    }


def batches(count: int) -> tuple[pg.Graph, pg.Node]:
    graph = pg.Graph("fields")
    return graph, graph.add(ops.FromSequence(list(range(count)))).then(ops.Batch(1, collate=lambda items: tree(items[0])))  # fmt: skip


def counters(loader: pg.Loader, stage: str) -> dict[str, int]:
    return dict(loader.profile().stages[stage].counters)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_all_fields_of_a_batch_go_in_one_copy(counted):
    graph, node = batches(50)
    with graph.loader(node.then(ops.CopyToDevice("cpu", copy=True))) as loader:
        for step, batch in enumerate(loader):
            assert equal(batch, tree(step))
        found = counters(loader, "copy")
    whole = found["bytes_copied"] // 50
    assert found["copies"] == 50
    assert sum(size == whole for size in counted.sizes) == 50
    # What is left are the small fields, copied out of the slab: on the device, and less than one part in 16 each.
    assert all(16 * size < whole for size in counted.sizes if size != whole)


def test_large_fields_lie_in_one_slab_with_storages_of_their_own_and_small_ones_outside():
    graph, node = batches(1)
    with graph.loader(node.then(ops.CopyToDevice("cpu", copy=True))) as loader:
        (batch,) = loader
    places, nbytes = places_for([leaf for leaf in tree(0).values() if isinstance(leaf, torch.Tensor)])
    image, mask = batch["image"], batch["mask"]
    assert image.data_ptr() % 64 == 0
    assert mask.data_ptr() - image.data_ptr() == places[1].offset
    assert image.untyped_storage().data_ptr() != mask.untyped_storage().data_ptr()
    mask.add_(1)
    assert (image._version, mask._version) == (0, 1)
    for name in ("label", "half", "flag", "phase", "scale"):
        inside = batch[name].data_ptr() - image.data_ptr()
        assert not 0 <= inside < nbytes, name


def test_a_batch_that_is_kept_whole_is_never_overwritten():
    graph, node = batches(200)
    with graph.loader(node.then(ops.CopyToDevice("cpu", copy=True))) as loader:
        kept = list(loader)
    assert all(equal(batch, tree(step)) for step, batch in enumerate(kept))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_scatter_copies_large_rows_from_where_they_lie_and_gathers_the_rest_in_one_copy(counted, parts):
    graph, node = batches(20)
    with graph.loader(node.then(ops.Scatter(["cpu"] * parts, copy=True))) as loader:
        for step, scattered in enumerate(loader):
            whole = tree(step)
            for name in ("image", "mask", "label", "half", "flag", "phase", "last"):
                assert torch.equal(torch.cat([part[name] for part in scattered]), whole[name]), name
            assert all(part["scale"].item() == step for part in scattered)
        found = counters(loader, "scatter")
    assert found["copies"] == 20 * parts * 3  # the image, the mask, and all that is small
    assert found["bytes_written"] < found["bytes_copied"] / 4


@pytest.mark.usefixtures("accelerator")
def test_pin_writes_every_field_into_one_slab_and_keeps_small_ones_out_of_it():
    counts: dict[str, int] = {}

    def count(name: str, n: int) -> None:
        counts[name] = counts.get(name, 0) + n

    pin = ops.Pin()
    pin.open(Context("pin", count=count, memory="pinned"))
    whole = tree(3)
    chunk = pin.process(Chunk(dict(whole), (("s", 0),), batched=True))
    assert equal(chunk.data, whole)
    assert chunk.data["image"].data_ptr() != whole["image"].data_ptr()
    # The copy behind it finds all of them.
    assert chunk.packed.places([leaf for leaf in chunk.data.values() if isinstance(leaf, torch.Tensor)])
    assert counts["slabs_made"] >= 1
    # Small ones are pinned by themselves, and get to the slab with the copy; of no bytes there is nothing to pin.
    tensors = [leaf for leaf in chunk.data.values() if isinstance(leaf, torch.Tensor)]
    assert all(leaf.is_pinned() for leaf in tensors if leaf.nbytes)
    assert counts["bytes_written"] >= whole["image"].nbytes + whole["mask"].nbytes + whole["label"].nbytes
