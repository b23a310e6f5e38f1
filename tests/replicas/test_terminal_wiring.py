"""The graph's terminal ``ops.Scatter`` feeds the executor: no copy through the first device, slabs come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import places
from torch import nn
from torch.nn.functional import cross_entropy

import pipegraph as pg
from pipegraph import operators as ops

from .conftest import MakeExecutor, assert_close

pytestmark = pytest.mark.usefixtures("place")

ROWS = 50


def sample(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    return {"x": torch.randn(4, generator=generator, dtype=torch.double, device="cpu"), "y": index % 3}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("copy", [False, True])
def test_training_from_a_graph_equals_a_plain_loop(
    make_executor: MakeExecutor, slots: int, copy: bool
) -> None:
    devices = places(slots)
    graph = pg.Graph("train", seed=3)
    batches = graph.add(ops.FromSequence(list(range(ROWS)))).then(sample).then(ops.Batch(16))
    batches.then(ops.Scatter(devices, copy=copy))
    alone = model()
    optimizer = sgd(alone.parameters())
    for _ in range(2):
        for start in range(0, ROWS, 16):
            rows = [sample(index) for index in range(start, min(start + 16, ROWS))]
            optimizer.zero_grad()
            x = torch.stack([row["x"] for row in rows]).to(torch.get_default_device())
            y = torch.tensor([row["y"] for row in rows])
            cross_entropy(alone(x), y).backward()
            optimizer.step()
    executor = make_executor(model(), devices, optimizer=sgd)
    with graph.loader(epochs=2) as loader:
        for _ in range(2):
            for batch in loader:
                assert isinstance(batch, pg.Scattered)
                executor.step(
                    batch,
                    lambda outputs, part: cross_entropy(outputs, part["y"]),
                    lambda module, part: module(part["x"]),
                )
    assert_close(executor, alone)
