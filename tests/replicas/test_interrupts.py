"""A backward that fails once, and Ctrl-C at every line: what comes next has the right numbers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from accelerators import drawn
from torch import nn

import pipegraph
from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor

from .conftest import MakeExecutor, assert_replicas_equal

OURS = tuple(str(Path(pipegraph.__file__).parent / name) for name in ("replicas", "device"))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data(seed: int = 0, rows: int = 7) -> torch.Tensor:
    return drawn(rows, 4, seed=seed)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def square(outputs: torch.Tensor, part: Any = None) -> torch.Tensor:
    return outputs.pow(2).mean()


def same(mine: nn.Module, its: nn.Module) -> bool:
    pairs = zip(mine.parameters(), its.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in pairs)


def assert_same_gradients(mine: nn.Module, its: nn.Module) -> None:
    for (name, a), b in zip(mine.named_parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13, msg=name)


# A backward that fails once


class BrokenError(Exception):
    """Of the user's own."""


class Failing(torch.autograd.Function):
    """Its backward fails, as one does that finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise BrokenError("backward")


def fails_below(model: nn.Sequential, executor: ReplicaExecutor, zero: Callable[[], None]) -> None:
    """A backward of the executor's outputs that fails after the last layer's gradients have come."""
    (one,) = executor._replicas.modules[1:2]
    handle = one[1].register_forward_hook(lambda module, given, out: Failing.apply(out))
    with pytest.raises(BrokenError):
        executor(data(9)).sum().backward()
    handle.remove()
    zero()


@pytest.mark.parametrize("how", ["none", "zeros", "executor"])
def test_after_a_failed_backward_of_ones_own_the_next_gradient_is_right(
    make_executor: MakeExecutor, how: str
) -> None:
    alone, executor = mlp(), make_executor(mlp(), 3)
    zero = {
        "none": executor.module.zero_grad,
        "zeros": lambda: executor.module.zero_grad(set_to_none=False),
        "executor": executor.zero_grad,
    }[how]
    for step in range(3):
        fails_below(executor.module, executor, zero)
        alone.zero_grad()
        for model in (alone, executor):
            square(model(data(step))).backward()  # type: ignore[operator]
        assert_same_gradients(executor.module, alone)
        zero()


def test_what_a_failed_backward_has_left_is_to_be_dropped(make_executor: MakeExecutor) -> None:
    alone, executor = mlp(), make_executor(mlp(), 3)
    fails_below(executor.module, executor, lambda: None)
    with pytest.raises(
        ReplicaError, match=r"failed half-way, .* '2.\w+' and others .*: drop them with zero_grad\(\)"
    ):
        executor(data())
    executor.module.zero_grad()
    for model in (alone, executor):
        square(model(data())).backward()  # type: ignore[operator]
    assert_same_gradients(executor.module, alone)


def test_a_graph_from_before_a_failed_backward_gives_right_gradients(make_executor: MakeExecutor) -> None:
    alone, executor = mlp(), make_executor(mlp(), 3)
    kept = [square(model(data())) for model in (alone, executor)]  # type: ignore[operator]
    fails_below(executor.module, executor, executor.module.zero_grad)
    kept[0].backward()
    with pytest.raises(ReplicaError, match="has failed, .*: call the executor again first"):
        kept[1].backward()
    executor.module.zero_grad()
    executor(data())
    kept = [square(model(data())) for model in (executor,)]
    kept[0].backward()
    assert_same_gradients(executor.module, alone)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulated_without_sync_are_dropped_with_the_models(
    make_executor: MakeExecutor, to_none: bool
) -> None:
    alone, executor = mlp(), make_executor(mlp(), 3, optimizer=sgd)
    for loop in ("own", "step"):
        with executor.no_sync():
            if loop == "own":
                square(executor(data(9))).backward()
            else:
                executor.step(data(9), square)
        executor.module.zero_grad(set_to_none=to_none)
        alone.zero_grad()
        for model in (alone, executor):
            square(model(data())).backward()  # type: ignore[operator]
        assert_same_gradients(executor.module, alone)
        executor.module.zero_grad(set_to_none=to_none)


def test_gradients_written_between_accumulating_calls_are_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 3)
    with executor.no_sync():
        square(executor(data(9))).backward()
    nn.utils.clip_grad_norm_(executor.module.parameters(), 1e-3)
    with pytest.raises(ReplicaError, match=r"gradient of '2.\w+' was written between accumulat"):
        executor(data())
    executor.zero_grad()
    executor(data())


# Ctrl-C


class Lines:
    """A tracer that raises KeyboardInterrupt at one line of this project, in the thread that it traces."""

    def __init__(self, target: int | None = None) -> None:
        self.seen: dict[tuple[str, int], None] = {}
        self._target = target
        self.raised: tuple[str, int] | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self.raised is None:
            place = (frame.f_code.co_filename, frame.f_lineno)
            if place not in self.seen:
                self.seen[place] = None
                if len(self.seen) - 1 == self._target:
                    self.raised = place
                    raise KeyboardInterrupt
        return self._line


def traced(lines: Lines, work: Callable[[], object]) -> None:
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        work()
    finally:
        sys.settrace(before)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    square(model(data(seed))).backward()
    optimizer.step()


def copied(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = copy.deepcopy(model)
    its = sgd(made.parameters())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made, its


@pytest.mark.parametrize("kind", ["step", "sharded", "accumulated", "own", "plain"])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_after_ctrl_c_at_any_line_the_next_step_is_right(
    make_executor: MakeExecutor, kind: str, stride: int
) -> None:
    options = {} if kind == "plain" else {"optimizer": sgd, "shard_optimizer": kind == "sharded"}
    executor = make_executor(mlp(), 2, **options)
    own = sgd(executor.module.parameters()) if kind == "plain" else executor.optimizer
    alone = mlp()
    optimizer = sgd(alone.parameters())

    def step(seed: int) -> None:
        if kind in ("own", "plain"):
            own.zero_grad()
            square(executor(data(seed))).backward()
            own.step()
        elif kind == "accumulated":
            with executor.no_sync():
                executor.step(data(seed), lambda outputs, part: square(outputs) / 2)
            executor.step(data(seed), lambda outputs, part: square(outputs) / 2)
        else:
            executor.step(data(seed), square)

    for _ in range(3):  # the layout of the buckets is known then
        step(0)
        trained(alone, optimizer, 0)
    whole = Lines()
    traced(whole, lambda: step(0))
    trained(alone, optimizer, 0)
    assert len(whole.seen) > 200
    for target in range(0, len(whole.seen), stride):
        lines = Lines(target)
        with pytest.raises(KeyboardInterrupt):
            traced(lines, lambda: step(1))
        executor.zero_grad()
        step(2)
        executor._exchange.settle()
        skipped, done = copied(alone, optimizer), copied(alone, optimizer)
        trained(*done, 1)
        trained(*skipped, 2)
        trained(*done, 2)
        if kind != "plain":
            assert_replicas_equal(executor)
        (alone, optimizer) = skipped if same(executor.module, skipped[0]) else done
        assert same(executor.module, alone), f"wrong after Ctrl-C at {lines.raised}"
