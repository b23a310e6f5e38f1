"""``executor(...)``: what DataParallel's users rely on."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from accelerators import drawn, places
from torch import nn

from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor

from .conftest import MakeExecutor

pytestmark = pytest.mark.usefixtures("place")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def data(rows: int = 7) -> torch.Tensor:
    return drawn(rows, 4)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 2, 7, 9])
def test_outputs_equal_the_models_own(make_executor: MakeExecutor, slots: int, rows: int) -> None:
    executor = make_executor(mlp(), slots)
    torch.testing.assert_close(executor(data(rows)), executor.module(data(rows)), rtol=1e-12, atol=1e-12)


def test_positional_and_keyword_arguments_are_cut_as_one(make_executor: MakeExecutor) -> None:
    class Scale(nn.Module):
        def forward(
            self, x: torch.Tensor, *, scale: torch.Tensor | float, mask: torch.Tensor
        ) -> torch.Tensor:
            return x * scale * mask

    executor = make_executor(Scale(), 4)
    for rows in (1, 3, 9):  # a last small batch crashes DataParallel with keyword arguments
        x, mask = data(rows), torch.ones(rows, 1)
        assert torch.equal(executor(x, scale=2.0, mask=mask), x * 2)
        assert torch.equal(executor(x=x, scale=2.0, mask=mask), x * 2)
    with pytest.raises(ValueError, match=r"inputs\[0\]\[0\] has 4 and inputs\[1\]\['mask'\] has 3"):
        executor(data(4), scale=1, mask=torch.ones(3))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_after_the_users_backward_the_module_holds_the_sum(make_executor: MakeExecutor, slots: int) -> None:
    alone = mlp()
    executor = make_executor(mlp(), slots)
    optimizer = torch.optim.SGD(executor.module.parameters(), lr=0.1)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    for rows in (7, 1, 4):
        for model, given in ((alone, optimizer_alone), (executor, optimizer)):
            given.zero_grad()
            (model(data(rows)).pow(2).sum() / rows).backward()  # type: ignore[operator]
        for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-13)
        optimizer.step()
        optimizer_alone.step()
    torch.testing.assert_close(executor(data()), alone(data()), rtol=1e-12, atol=1e-12)


def test_gradients_reach_inputs_that_need_them(make_executor: MakeExecutor) -> None:
    x = data(5).requires_grad_()
    other = data(5).requires_grad_()
    executor = make_executor(mlp(), 3)
    executor(x).pow(2).sum().backward()
    executor.module(other).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-13)


def test_inference_and_no_grad_of_the_caller_hold(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2)
    with torch.no_grad():
        assert not executor(data()).requires_grad
    with torch.inference_mode():
        assert executor(data()).is_inference()
    assert executor(data()).requires_grad


# What is refused, and what is said


def test_tensor_hooks_lazy_and_in_place_compiled_modules_are_refused() -> None:
    hooked = mlp()
    hooked[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(ReplicaError, match=r"parameter '0.weight' has tensor hooks"):
        ReplicaExecutor(hooked, places(2), optimizer=sgd)
    with pytest.raises(ReplicaError, match="not initialised"):
        ReplicaExecutor(nn.LazyLinear(3), places(1))
    compiled = mlp()
    compiled[0].compile(backend="eager")
    with pytest.raises(ReplicaError, match="module '0' was compiled in place"):
        ReplicaExecutor(compiled, places(2))
    with pytest.raises(ReplicaError, match="devices is empty"):
        ReplicaExecutor(mlp(), [])


# Life


def test_closing_ends_threads_takes_the_hooks_off_and_keeps_the_model() -> None:
    before = set(threading.enumerate())
    model = mlp()
    with ReplicaExecutor(model, places(3), optimizer=sgd) as executor:
        executor.step(data(), lambda out, part: out.sum())
        assert "ready, 1 calls" in repr(executor)
    assert set(threading.enumerate()) <= before
    assert "closed" in repr(executor)
    with pytest.raises(ReplicaError, match=r"closed: close\(\) was called"):
        executor(data())
    executor.close()
    model(data()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    copy.deepcopy(model)
    ReplicaExecutor(model, places(2)).close()
