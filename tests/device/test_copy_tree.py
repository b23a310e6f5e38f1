"""Whole batches on a stage's own stream, and batches in parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from accelerators import in_pinned

from pipegraph.device.backend import Slot
from pipegraph.device.copy import copy_tree
from pipegraph.device.opening import backend_for
from pipegraph.device.scattered import Scattered

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


def test_scattered_is_a_sequence_of_parts_with_devices() -> None:
    parts = Scattered(["a", "b", "c"], ["cpu", "cpu", "cuda:1"])
    assert list(parts) == ["a", "b", "c"]
    assert (CPU, CPU, torch.device("cuda:1")) == parts.devices
    assert repr(parts) == "<Scattered: 3 parts on cpu, cpu, cuda:1>"
    assert list(parts[1:]) == ["b", "c"]
    assert torch.device("cuda:1") == parts[1:].devices[1]
    assert parts.ready == (None, None, None)


def test_reading_a_part_waits_for_its_event(simulated: torch.device) -> None:
    with backend_for(simulated) as backend:
        part, ready = copy_tree(in_pinned(torch.ones(3)), backend, backend.stream(Slot(simulated), "copy"))
        scattered = Scattered([part, "no wait"], [simulated, "cpu"], [ready, None])
        assert scattered.ready == (ready, None)
        assert scattered.wait(1) == "no wait"
        assert not ready.query()
        assert scattered[:1].wait(0).tolist() == [1] * 3
