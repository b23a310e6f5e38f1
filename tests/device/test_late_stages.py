"""What stages compute on the device behind a copy, and what replicas read of it, where all of it is late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import delay, here, new_stream
from torch import nn

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk
from pipegraph.device.accelerator import AcceleratorBackend

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]
COUNT, ROWS, SIZE = 40, 8, 32


@pytest.fixture
def all_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the device, and what Normalize does there."""
    copy, process = AcceleratorBackend.copy, ops.Normalize.process

    def late_copy(self: AcceleratorBackend, dst: torch.Tensor, src: torch.Tensor) -> None:
        delay()
        copy(self, dst, src)

    def late_process(self: ops.Normalize, chunk: Chunk) -> Chunk:
        delay()
        return process(self, chunk)

    monkeypatch.setattr(AcceleratorBackend, "copy", late_copy)
    monkeypatch.setattr(ops.Normalize, "process", late_process)


def images() -> pg.Node:
    def made(numbers: list[int]) -> dict[str, torch.Tensor]:
        return {
            "image": torch.full((ROWS, SIZE, SIZE, 3), numbers[0], dtype=torch.uint8),
            "y": torch.full((ROWS,), float(numbers[0])),
        }

    node = pg.Graph("late").add(ops.FromSequence(list(range(COUNT)))).then(ops.Batch(1, collate=list))
    return node.then(made).then(ops.CopyToDevice("accelerator"), capacity=4)


@pytest.mark.parametrize("side_stream", [False, True], ids=["default-stream", "side-stream"])
def test_what_normalize_computes_on_the_device_is_waited_for(all_late: None, side_stream: bool) -> None:
    node = images().then(ops.Normalize((0.0,) * 3, (1.0,) * 3), capacity=4)
    wrong = torch.zeros((), dtype=torch.int64, device=here())
    stream = new_stream(here()) if side_stream else torch.accelerator.current_stream()
    torch.accelerator.synchronize()
    with node.graph.loader() as loader, stream:
        for number, batch in enumerate(loader):
            delay()
            expected = torch.full((), number, dtype=torch.float32, device=here()) / 255
            wrong += ((batch["image"] - expected).abs() > 1e-6).any()
            wrong += (batch["y"] != number).any()
            del batch
    torch.accelerator.synchronize()
    assert wrong.item() == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_replicas_of_one_device_read_what_copy_to_device_brings(all_late: None, slots: int) -> None:
    """The batch lies on the device; the slots behind the first read their rows on streams of their own."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(1, 1).to(here())

    def on_x(module: Any, part: Any) -> Any:
        return module(part["image"].float().mean((1, 2, 3)).unsqueeze(1) / COUNT)

    def loss(outputs: torch.Tensor, part: Any) -> torch.Tensor:
        return (outputs.squeeze(1) - part["y"] / COUNT).pow(2).mean()

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    alone = model()
    optimizer = sgd(alone.parameters())
    for number in range(COUNT):
        part = {
            "image": torch.full((ROWS, SIZE, SIZE, 3), number, dtype=torch.uint8, device=here()),
            "y": torch.full((ROWS,), float(number), device=here()),
        }
        optimizer.zero_grad()
        loss(on_x(alone, part), part).backward()
        optimizer.step()
    with pg.ReplicaExecutor(model(), [here()] * slots, optimizer=sgd) as executor:
        with images().graph.loader() as loader:
            for batch in loader:
                executor.step(batch, loss, on_x)
                del batch
        for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, its)
