"""Every accelerator of torch takes the same lines: what it offers is asked, and what it lacks is made up for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_device import offer

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.components import Context
from pipegraph.device import accelerator as module
from pipegraph.device.accelerator import every_device
from pipegraph.device.slabs import pinned
from pipegraph.errors import DeviceError

ROWS, WIDTH = 4, 512
STEPS = 40


def batch_of(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((ROWS, WIDTH), float(number)), "label": torch.full((ROWS,), number)}


def numbers(count: int = STEPS) -> pg.Node:
    node = pg.Graph("numbers").add(ops.FromSequence(list(range(count)))).then(ops.Batch(1))
    return node.then(lambda batch: batch_of(int(batch[0])))


def wrong(delivered: list[tuple[int, torch.Tensor]]) -> int:
    """Batches that hold other numbers than their own; read by the host, which waits for the device."""
    return sum(bool((values.cpu() != number).any()) for number, values in delivered)


def arrived(node: pg.Node) -> int:
    found = []
    with node.graph.loader(node) as loader:
        for number, batch in enumerate(loader):
            found += [(number, batch["x"][0, :8].clone()), (number, batch["label"].clone())]
            del batch
        assert len(found) == 2 * STEPS
    return wrong(found)


# -- names ---------------------------------------------------------------------------------------


def test_the_accelerator_that_is_there_has_a_name_of_its_own(accelerator: torch.device) -> None:
    copy = ops.CopyToDevice("accelerator")
    assert copy.device == accelerator
    assert ops.Scatter(["accelerator:0", accelerator]).devices == (accelerator, accelerator)
    assert every_device()[0] == accelerator
    assert arrived(numbers().then(copy, capacity=2)) == 0


def test_without_an_accelerator_its_name_is_refused() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(DeviceError, match=r"'accelerator': torch finds no accelerator.*'cpu'"):
        ops.CopyToDevice("accelerator")
    assert every_device() == [torch.device("cpu")]


# -- pinned batches that leave the graph ------------------------------------------------------------


def sent_by_the_loop(node: pg.Node, device: torch.device) -> int:
    """As everybody writes it: the loop sends the batch itself, and keeps nothing of it in host memory."""
    found = []
    with node.graph.loader(node) as loader:
        for number, batch in enumerate(loader):
            assert batch["x"].is_pinned() and batch["label"].is_pinned()
            found += [(number, tensor.to(device, non_blocking=True)) for tensor in batch.values()]
            del batch
    return wrong(found)


def test_slabs_that_a_loop_sends_itself_are_written_too_early(
    simulated: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = ops.Pin.open

    def in_slabs(self: ops.Pin, context: Context) -> None:
        context.memory = "pinned"
        opened(self, context)

    monkeypatch.setattr(ops.Pin, "open", in_slabs)
    assert sent_by_the_loop(numbers().then(ops.Pin(), capacity=2), simulated) > 0


# -- copies beside the slabs --------------------------------------------------------------------------


# -- devices that offer less ------------------------------------------------------------------------


LESS: dict[str, tuple[dict[str, Any], str]] = {
    "no events": ({"events": False}, "every copy is waited for"),
    "one stream": ({"streams": False}, "one stream only"),
    "unified memory": ({"streams": False, "pinned": False, "missing": {"aten::set_"}}, "one stream only"),
    "nothing pinned": ({"pinned": False}, ""),
}


@pytest.mark.parametrize("less", LESS)
def test_what_a_device_lacks_is_said_and_made_up_for(simulated: torch.device, less: str) -> None:
    offered, said = LESS[less]
    offer(**offered)
    node = numbers().then(ops.Pin()).then(ops.CopyToDevice(simulated), capacity=2)
    plan = str(node.graph.plan())
    assert said in plan
    assert ("pin: left out: torch pins no memory for simulated" in plan) == (not offered.get("pinned", True))
    assert arrived(node) == 0
    scattered = numbers().then(ops.Scatter([simulated, simulated]), capacity=2)
    parts = []
    with scattered.graph.loader(scattered) as loader:
        for number, batch in enumerate(loader):
            parts += [(number, batch.wait(place)["x"][0, :8].clone()) for place in range(2)]
            del batch
    assert wrong(parts) == 0


def test_a_device_is_asked_what_it_offers(accelerator: torch.device) -> None:
    module._probed.cache_clear()
    found = module.offers(accelerator)
    assert found.streams and found.events and found.pinned
    assert found.lacking is None


# -- current devices and modes ----------------------------------------------------------------------


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_memory_is_pinned_for_the_device_that_reads_it(
    simulated: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: set[int] = set()
    empty = torch.empty

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            there.add(torch.accelerator.current_device_index())
        return empty(*args, **options)

    module.unpinned()
    module.offers(torch.device("simulated:1"))  # asked on those devices
    monkeypatch.setattr(torch, "empty", noting)
    second = torch.device("simulated:1")
    in_a_thread(lambda: pinned(64, second))
    node = numbers().then(ops.Pin()).then(ops.CopyToDevice(second))
    assert arrived(node) == 0
    assert arrived(numbers().then(ops.CopyToDevice(second))) == 0
    assert there == {1}
