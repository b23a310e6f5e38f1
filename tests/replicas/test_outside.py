"""What users do outside ``step``: their own backwards, what they set on the module, the executor's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import drawn, on_the_cpu, places
from torch import nn

from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor

from .conftest import MakeExecutor

pytestmark = pytest.mark.usefixtures("place")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data(rows: int = 7) -> torch.Tensor:
    return drawn(rows, 4)


def loss_of(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def assert_same_gradients(executor: ReplicaExecutor, alone: nn.Module) -> None:
    for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        if its.grad is not None:
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-13)


# Backwards


def test_autograd_knows_the_models_own_parameters(make_executor: MakeExecutor) -> None:
    """`autograd.grad`, ``backward(inputs=)`` and tensor hooks give what they give on one device."""
    alone, executor = mlp(), make_executor(mlp(), 3)
    for model, called in ((alone, alone), (executor.module, executor)):
        handle = model[0].weight.register_hook(lambda grad: 2 * grad)
        parameters = list(model.parameters())
        grads = torch.autograd.grad(called(data()).pow(2).sum(), parameters, create_graph=True)
        torch.stack([grad.pow(2).sum() for grad in grads]).sum().backward()
        called(data()).sum().backward(inputs=parameters[:2])
        handle.remove()
    assert_same_gradients(executor, alone)


# What is set on the module between steps


class Scaled(nn.Module):
    """With plain attributes, and buffers that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.double))
        self.register_buffer("shift", torch.zeros(4, dtype=torch.double))
        self.options = {"nested": [1.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = getattr(self, "late", None)
        shift = getattr(self, "shift", None) if shift is None else shift
        x = x * self.weight * self.options["nested"][0]
        return x if shift is None else x + shift


def test_buffers_and_modes_reach_all_replicas_by_themselves(make_executor: MakeExecutor) -> None:
    executor = make_executor(Scaled(), 2, optimizer=sgd)
    executor.module.shift.fill_(7.0)
    executor.eval()
    executor.step(data(), loss_of)
    for module in executor._replicas.modules:
        assert not module.training
        assert module.shift.tolist() == [7.0] * 4


def test_what_a_replica_would_have_alone_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    nn.init.zeros_(executor.module[0].weight)
    with pytest.raises(ReplicaError, match=r"'0.weight' was written since the last step.*executor.sync\(\)"):
        executor.step(data(), loss_of)
    executor.sync()
    handle = executor.module[0].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ReplicaError, match=r"'0.weight' has tensor hooks"):
        executor.step(data(), loss_of)
    handle.remove()
    executor.step(data(), loss_of)
    executor(data()).sum().backward()
    executor.optimizer.step()
    executor.zero_grad()
    with pytest.raises(ReplicaError, match="was written since the last step"):
        executor.step(data(), loss_of)
    executor.sync()
    del executor.optimizer.param_groups[0]["params"][1:3]
    with pytest.raises(ReplicaError, match=r"parameters in executor.optimizer.param_groups have changed"):
        executor.step(data(), loss_of)


@on_the_cpu
def test_several_devices_in_a_process_group_are_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ReplicaError, match="inside a process group: use .*DistributedDataParallel"):
            ReplicaExecutor(mlp(), places(2), optimizer=sgd)
        ReplicaExecutor(mlp(), places(1), optimizer=sgd).close()
    finally:
        torch.distributed.destroy_process_group()


# The end


# Rows
