"""Whole batches on a stage's own stream, and batches in parts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from chaos import Chaos

from pipegraph.device import CpuBackend, Scattered, Slot, backend_for, copy_tree

CPU = torch.device("cpu")


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


def test_every_tensor_is_copied_and_everything_else_passed_on() -> None:
    tree = {
        "pair": Pair(torch.arange(6).reshape(2, 3), "a"),
        "keys": ["k0", "k1"],
        "none": None,
        "label": torch.tensor(3),
    }
    with backend_for("cpu") as backend:
        copied, ready = copy_tree(tree, backend, backend.stream(Slot(CPU), "copy"))
        ready.wait()
    assert isinstance(copied["pair"], Pair)
    assert torch.equal(tree["pair"].image, copied["pair"].image)
    assert copied["pair"].image.data_ptr() != tree["pair"].image.data_ptr()
    assert (copied["keys"], copied["none"], copied["pair"].name) == (["k0", "k1"], None, "a")
    assert copied["label"].item() == 3


def test_channels_last_is_kept() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with backend_for("cpu") as backend:
        copied, ready = copy_tree(image, backend, backend.stream(Slot(CPU), "copy"))
        ready.wait()
    assert copied.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(image, copied)


@pytest.mark.parametrize("waits", [True, False])
def test_a_slab_refilled_without_waiting_for_the_copy_is_found(waits: bool) -> None:
    """The ring of two slabs that the loader uses, once right and once with its wait removed."""
    wrong = 0
    with CpuBackend(Chaos(seed=3)) as backend:
        stream = backend.stream(Slot(CPU), "copy")
        slabs = [torch.zeros(8), torch.zeros(8)]
        copied = [backend.event(), backend.event()]
        delivered = []
        for step in range(200):
            if waits:
                copied[step % 2].synchronize()
            slabs[step % 2].fill_(step)
            batch, copied[step % 2] = copy_tree(slabs[step % 2], backend, stream)
            delivered.append((step, batch, copied[step % 2]))
        for step, batch, ready in delivered:
            ready.wait()
            wrong += not torch.equal(torch.full((8,), float(step)), batch)
    assert (wrong == 0) == waits


def test_scattered_is_a_sequence_of_parts_with_devices() -> None:
    parts = Scattered(["a", "b", "c"], ["cpu", "cpu", "cuda:1"])
    assert list(parts) == ["a", "b", "c"]
    assert (CPU, CPU, torch.device("cuda:1")) == parts.devices
    assert repr(parts) == "<Scattered: 3 parts on cpu, cpu, cuda:1>"
    assert list(parts[1:]) == ["b", "c"]
    assert torch.device("cuda:1") == parts[1:].devices[1]
    assert parts.ready == (None, None, None)


def test_reading_a_part_waits_for_its_event() -> None:
    with CpuBackend(Chaos(seed=0, share=1.0)) as backend:
        stream = backend.stream(Slot(CPU), "copy")
        part, ready = copy_tree(torch.ones(3), backend, stream)
        part.fill_(-1)
        scattered = Scattered([part, "no wait"], ["cpu", "cpu"], [ready, None])
        assert torch.equal(torch.ones(3), scattered.wait(0))
        assert scattered.wait(1) == "no wait"


def test_scattered_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="2 parts, 1 devices"):
        Scattered([1, 2], ["cpu"])
