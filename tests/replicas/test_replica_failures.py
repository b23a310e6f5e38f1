"""Failures keep their type, say where, hang nothing, and leave the executor usable or clearly closed."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from accelerators import drawn, places
from torch import nn

from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

pytestmark = pytest.mark.usefixtures("place")


class BrokenError(Exception):
    """Of the user's own."""


class Net(nn.Module):
    """Its first input column says on which rows to fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] == 99).any()):
            raise BrokenError("forward")
        out: torch.Tensor = self.net(x)
        return out


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def data(seed: int = 0, bad: int | None = None) -> torch.Tensor:
    x = drawn(9, 4, seed=seed)
    if bad is not None:
        x[bad * 3, 0] = 99
    return x


def square(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


def assert_usable(executor: ReplicaExecutor, steps: int) -> None:
    """As good as one that never failed: the same numbers as one device that skipped the failing batches."""
    alone = Net()
    optimizer = sgd(alone.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        square(alone(data(step)), None).backward()
        optimizer.step()
    assert_replicas_equal(executor)
    assert_close(executor, alone)


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_failing_forward(make_executor: MakeExecutor, replica: int) -> None:
    executor = make_executor(Net(), 3, optimizer=sgd)
    for step in range(6):
        with pytest.raises(BrokenError, match="forward") as caught:
            executor.step(data(bad=replica), square)
        assert caught.value.__notes__ == [f"in replica {replica} on {executor._runner.slots[replica]}"]
        assert "forward" in [entry.name for entry in caught.traceback]
        executor.step(data(step), square)
    assert_usable(executor, 6)


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_failing_hook_in_backward(make_executor: MakeExecutor, place: torch.device, where: str) -> None:
    """After the first bucket was reduced, or before."""
    executor = make_executor(Net(), 3, optimizer=sgd)
    replica: Any = executor._replicas.modules[2]
    layer = replica.net[2 if where == "first" else 0]

    def fail(*_: Any) -> None:
        raise BrokenError("hook")

    for step in range(6):
        handle = layer.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(BrokenError, match="hook") as caught:
            executor.step(data(seed=50), square)
        if place.type == "cpu":
            assert caught.value.__notes__ == [f"in replica 2 on {executor._runner.slots[2]}"]
        handle.remove()
        executor.step(data(step), square)
    assert_usable(executor, 6)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c_waits_for_the_replicas_and_closes_the_executor(
    make_executor: MakeExecutor, where: str
) -> None:
    executor = make_executor(Net(), 3, optimizer=sgd)

    def interrupt(*_: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    module: Any = executor._replicas.modules[1]
    if where == "forward":
        module.net[1].register_forward_hook(interrupt)
    else:
        module.net[0].weight.register_post_accumulate_grad_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        executor.step(data(seed=50), square)
        for _ in range(10_000):  # where the signal arrives late, it does so here
            pass
    with pytest.raises(ReplicaError, match="closed: a call was interrupted; build another"):
        executor.step(data(), square)
    after = make_executor(Net(), 3, optimizer=sgd)
    after.load_state_dict(executor.state_dict())
    assert_usable(after, 0)


def test_a_failing_optimizer_step_closes_the_executor_clearly(make_executor: MakeExecutor) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise BrokenError("optimizer")

    executor = make_executor(Net(), 2, optimizer=lambda params: Failing(params, lr=0.1))
    with pytest.raises(BrokenError, match="optimizer") as caught:
        executor.step(data(), square)
    assert (
        "the executor is closed: its replicas may differ after a failed optimizer step"
        in caught.value.__notes__
    )
    with pytest.raises(ReplicaError, match="closed: an optimizer step failed half-way"):
        executor.step(data(), square)


def test_a_failure_behind_unscaling_leaves_nothing_in_the_scaler(make_executor: MakeExecutor) -> None:
    torch.manual_seed(0)
    executor = make_executor(
        nn.Embedding(10, 4, sparse=True),
        places(1) * 2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    scaler, rows = torch.amp.GradScaler(torch.get_default_device().type), torch.arange(6)
    with pytest.raises(NotImplementedError, match="[Ss]parse"):
        executor.step(rows, square, clip_norm=1.0, scaler=scaler)  # torch has no norm of sparse gradients
    executor.step(rows, square, scaler=scaler)
    assert_replicas_equal(executor)
