"""Ctrl-C at every line: the executor is closed or as before, and what comes next has the right numbers."""

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


@pytest.mark.parametrize("kind", ["step", "accumulated", "plain"])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_after_ctrl_c_at_any_line_the_next_step_is_right(
    make_executor: MakeExecutor, kind: str, stride: int
) -> None:
    def begun() -> tuple[ReplicaExecutor, torch.optim.Optimizer]:
        executor = make_executor(mlp(), 2, optimizer=None if kind == "plain" else sgd)
        return executor, sgd(executor.module.parameters())

    def step(seed: int) -> None:
        if kind == "plain":
            own.zero_grad()
            square(executor(data(seed))).backward()
            own.step()
        elif kind == "accumulated":
            with executor.no_sync():
                executor.step(data(seed), lambda outputs, part: square(outputs) / 2)
            executor.step(data(seed), lambda outputs, part: square(outputs) / 2)
        else:
            executor.step(data(seed), square)

    executor, own = begun()
    alone = mlp()
    optimizer = sgd(alone.parameters())
    for _ in range(3):  # the layout of the buckets is known then
        step(0)
        trained(alone, optimizer, 0)
    whole = Lines()
    traced(whole, lambda: step(0))
    trained(alone, optimizer, 0)
    assert len(whole.seen) > 150
    for target in range(0, len(whole.seen), stride):
        lines = Lines(target)
        with pytest.raises(KeyboardInterrupt):
            traced(lines, lambda: step(1))
        try:
            executor.zero_grad()
            step(2)
        except ReplicaError:  # the executor is closed
            state, own_state = executor.state_dict(), own.state_dict()
            executor, own = begun()
            executor.load_state_dict(state)
            own.load_state_dict(own_state)
            step(2)
        skipped, done = copied(alone, optimizer), copied(alone, optimizer)
        trained(*done, 1)
        trained(*skipped, 2)
        trained(*done, 2)
        if kind != "plain":
            assert_replicas_equal(executor)
        (alone, optimizer) = skipped if same(executor.module, skipped[0]) else done
        assert same(executor.module, alone), f"wrong after Ctrl-C at {lines.raised}"
