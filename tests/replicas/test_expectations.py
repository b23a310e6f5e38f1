"""What users of DataParallel bring along: states, optimizers, autocast, containers, devices, interrupts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import drawn
from torch import nn

from .conftest import MakeExecutor

pytestmark = pytest.mark.usefixtures("place")


def mlp(dtype: torch.dtype = torch.double) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def data(rows: int = 6, dtype: torch.dtype = torch.double) -> torch.Tensor:
    return drawn(rows, 4, dtype=dtype)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def square(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


# Batches


# States and optimizers


# Copies, waits and devices


def test_gradients_live_in_their_buckets_while_backward_runs(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    reducer = executor._reducer
    assert reducer is not None
    complete, shared = reducer.complete, []

    def looked() -> None:
        for live in reducer._buckets:
            for replica, views in enumerate(live.views):
                for index, view in views.items():
                    grad = executor._replicas.parameters[replica][index].grad
                    shared.append(grad is not None and grad.data_ptr() == view.data_ptr())
        complete()

    reducer.complete = looked  # type: ignore[method-assign]
    executor.step(data(), square)
    assert len(shared) == 8
    assert all(shared)
