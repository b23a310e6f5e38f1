"""Batches on their way to an accelerator: one copy each, slabs used again only when nobody reads them any more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerators import delay, here

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Traits
from pipegraph.device.accelerator import AcceleratorBackend
from pipegraph.operators.batch_slabs import StageSlabs

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]
ROWS, WIDTH = 8, 4096


class Fill(Operator):
    """Writes its batches into slabs, as ``DecodeImage`` does: every value is the batch's number."""

    traits = Traits(slabs=True)

    def open(self, context: Context) -> None:
        self.stage = StageSlabs(context)

    def process(self, chunk: Chunk) -> Chunk:
        number = int(chunk.data[0])
        riding = {
            "label": torch.arange(ROWS) + number,
            "half": torch.full((ROWS, WIDTH), number, dtype=torch.bfloat16),
        }
        slab = self.stage.take(ROWS * WIDTH * 4, riding)
        x, lease = self.stage.deliver(slab, torch.float32, (ROWS, WIDTH))
        x.fill_(number)
        chunk.data = {"x": x, **riding, "key": [str(number)] * ROWS}
        self.stage.pack(chunk, lease, x)
        return chunk


def numbers(count: int, in_slabs: bool = True) -> pg.Node:
    """``count`` batches: in pinned slabs from the start, or collated in ordinary memory."""
    node = pg.Graph().add(ops.FromSequence(list(range(count)))).then(ops.Batch(1))
    if in_slabs:
        return node.then(Fill(), capacity=2)
    return node.then(
        lambda batch: {
            "x": torch.full((ROWS, WIDTH), float(batch[0])),
            "label": torch.arange(ROWS) + int(batch[0]),
            "half": torch.full((ROWS, WIDTH), int(batch[0]), dtype=torch.bfloat16),
        }
    )


def right(batch: Any, number: int) -> bool:
    return bool(
        (batch["x"] == number).all()
        and (batch["half"] == torch.tensor(number, dtype=torch.bfloat16, device=here())).all()
        and torch.equal(batch["label"].cpu(), torch.arange(ROWS) + number)
    )


@pytest.mark.parametrize("in_slabs", [True, False], ids=["slabs", "gathered"])
def test_every_batch_arrives_in_one_copy(in_slabs: bool) -> None:
    node = numbers(100, in_slabs).then(ops.CopyToDevice("accelerator"), capacity=2)
    with node.graph.loader() as loader:
        for number, batch in enumerate(loader):
            assert batch["x"].device == torch.device(here())
            assert right(batch, number)
        counters = loader.profile().stages["copy"].counters
    assert counters["copies"] == 100
    assert counters["slabs_made"] <= 7 + 6 * (not in_slabs)


def test_the_plan_pins_the_slabs_and_leaves_pin_out() -> None:
    node = numbers(4).then(ops.Pin()).then(ops.CopyToDevice("accelerator"))
    text = str(node.graph.plan())
    assert "its slabs lie in pinned memory" in text
    assert "pin: left out" in text
    with node.graph.loader() as loader:
        assert all(right(batch, number) for number, batch in enumerate(loader))


def test_pin_makes_one_pinned_slab_for_a_copy_and_pins_each_tensor_for_the_loop() -> None:
    node = numbers(20, in_slabs=False).then(ops.Pin())
    copied = node.then(ops.CopyToDevice("accelerator"))
    with node.graph.loader(node) as loader:
        for batch in loader:
            assert all(tensor.is_pinned() for tensor in batch.values())  # each by itself
    with node.graph.loader(copied) as loader:
        assert all(right(batch, number) for number, batch in enumerate(loader))
        counters = loader.profile().stages["copy"].counters
    assert counters["copies"] == 20
    assert counters["bytes_written"] == 20 * ROWS * 8  # the labels, which lie in memory of their own


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(batch)
        return weight * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0].mean(), None


HOLDINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[1:3],
    "a view": lambda t: t.view(-1),
    "a transpose": lambda t: t.t(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "dlpack": torch.utils.dlpack.from_dlpack,
    "another dtype": lambda t: t.view(torch.int32).view(torch.float32),
    "the storage": lambda t: torch.empty(0, device=t.device).set_(t.untyped_storage(), 0, t.shape),  # type: ignore[call-overload]
    "autograd": lambda t: _Saved.apply(torch.ones((), device=t.device, requires_grad=True), t),
}


@pytest.mark.parametrize("how", HOLDINGS, ids=lambda how: how.replace(" ", "-"))
def test_what_is_held_in_any_way_stays_as_it_is(how: str, accelerator: torch.device) -> None:
    if how == "dlpack" and accelerator.type == "simulated":
        pytest.skip("torch names no simulated device to other libraries")
    node = numbers(100).then(ops.CopyToDevice("accelerator"))
    with node.graph.loader() as loader:
        batches = iter(loader)
        next(batches)
        held = HOLDINGS[how](next(batches)["x"])
        gc.collect()
        for _ in batches:
            pass
    value = held.grad_fn.saved_tensors[0] if held.grad_fn is not None else held
    assert (value == 1).all()


def read_late(count: int, side_stream: bool, last: Operator) -> int:
    """Wrong batches, where spinning kernels make the reading late and the host lets go of each batch at once."""
    node = numbers(count).then(last, capacity=2)
    wrong = torch.zeros((), dtype=torch.int64, device=here())
    torch.accelerator.synchronize()
    stream = torch.Stream(here()) if side_stream else torch.accelerator.current_stream()
    with node.graph.loader() as loader, stream:
        for number, batch in enumerate(loader):
            delay()
            for part in batch if isinstance(batch, pg.Scattered) else (batch,):
                wrong += (part["x"] != number).any()
                wrong += (part["half"] != torch.full((), number, dtype=torch.bfloat16, device=here())).any()
            del batch, part
    torch.accelerator.synchronize()
    return int(wrong)


LAST = {
    "copied": lambda: ops.CopyToDevice("accelerator"),
    "scattered": lambda: ops.Scatter(["accelerator", "accelerator"]),
}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("side_stream", [False, True], ids=["default-stream", "side-stream"])
@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_slab_is_not_written_while_a_late_stream_reads_it(side_stream: bool, last: str, count: int) -> None:
    assert read_late(count, side_stream, LAST[last]()) == 0


def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = AcceleratorBackend.copy

    def late(self: AcceleratorBackend, dst: torch.Tensor, src: torch.Tensor) -> None:
        if src.device.type == "cpu":
            delay()
        copy(self, dst, src)

    monkeypatch.setattr(AcceleratorBackend, "copy", late)


def test_late_copies_deliver_right_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    late_copies(monkeypatch)
    node = numbers(100).then(ops.CopyToDevice("accelerator"), capacity=2)
    with node.graph.loader() as loader:
        assert all(right(batch, number) for number, batch in enumerate(loader))


def test_a_stage_behind_the_copy_sees_it_finished_and_holds_its_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    late_copies(monkeypatch)
    node = numbers(100).then(ops.CopyToDevice("accelerator")).then(lambda batch: batch["x"].sum())
    with node.graph.loader() as loader:
        sums = [total.item() for total in loader]
    assert sums == [float(number * ROWS * WIDTH) for number in range(100)]


def test_device_memory_is_that_of_the_slabs_and_goes_when_the_loader_does() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    node = numbers(100).then(ops.CopyToDevice("accelerator"), capacity=2)
    with node.graph.loader() as loader:
        torch.accelerator.reset_peak_memory_stats()
        for batch in loader:
            del batch
        counters = loader.profile().stages["copy"].counters
    slab = ROWS * WIDTH * 6 + 1024
    assert torch.accelerator.max_memory_allocated() - before <= (counters["slabs_made"] + 1) * slab
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
