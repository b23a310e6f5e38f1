"""What stages compute on the device behind a copy, and what replicas read of it, where all of it is late."""

from __future__ import annotations

import pytest
import torch
from accelerators import delay, here, new_stream

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
