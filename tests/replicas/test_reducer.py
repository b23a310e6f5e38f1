"""Buckets, their order, and hooks that never wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerators import drawn
from torch import nn

from pipegraph.device.accelerator import backend_for
from pipegraph.device.backend import slots_on
from pipegraph.replicas.reduce_streams import plan_buckets
from pipegraph.replicas.reducer import Reducer

from .conftest import MakeExecutor, assert_close

# The plan


def test_the_first_bucket_is_small_and_owners_take_turns() -> None:
    buckets = plan_buckets(
        [torch.empty(1000)] * 10, range(9, -1, -1), 3, first_bytes=4000, bucket_bytes=12000
    )
    assert [list(b.offsets) for b in buckets] == [[9], [8, 7, 6], [5, 4, 3], [2, 1, 0]]
    assert [b.owner for b in buckets] == [0, 1, 2, 0]


# In the executor


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def data(seed: int, rows: int = 6) -> torch.Tensor:
    return drawn(rows, 4, seed=seed)


def square(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket per few parameters."""
    defaults = plan_buckets.__defaults__
    monkeypatch.setattr(plan_buckets, "__defaults__", (64, 1100))
    assert defaults is not None


def trained_alone(steps: int, rows: Callable[[int], int]) -> nn.Module:
    alone = model()
    optimizer = sgd(alone.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        square(alone(data(step, rows(step))), None).backward()
        optimizer.step()
    return alone


@pytest.mark.usefixtures("small_buckets", "place")
def test_buckets_are_launched_in_order_and_rebuilt_once(make_executor: MakeExecutor) -> None:
    executor = make_executor(model(), 3, optimizer=sgd)
    reducer = executor._reducer
    assert reducer is not None
    launched: list[Any] = []
    launch = reducer.streams.launch

    def watched(live: Any, contributors: Any) -> None:
        launched.append(live.plan)
        launch(live, contributors)

    reducer.streams.launch = watched  # type: ignore[method-assign]
    layouts = []
    for step in range(4):
        launched.clear()
        executor.step(data(step), square)
        assert launched == list(reducer.layout)
        layouts.append(reducer.layout)
    assert len(layouts[0]) > 2
    assert layouts[1] == layouts[2] == layouts[3]
    # The last layer's gradients come first.
    assert set(layouts[1][0].offsets) <= {4, 5}
    assert_close(executor, trained_alone(4, lambda step: 6))


@pytest.mark.usefixtures("small_buckets")
def test_buckets_are_reduced_while_backward_runs(make_executor: MakeExecutor) -> None:
    """The last layer's bucket is summed while the first layer's backward is still held up."""
    executor = make_executor(model(), 2, optimizer=sgd)
    executor.step(data(0), square)
    reducer = executor._reducer
    assert reducer is not None
    summed = threading.Event()
    seen: list[bool] = []

    add = reducer.streams._sum

    def noted(live: Any, contributors: Any) -> None:
        add(live, contributors)
        if live.plan == reducer.layout[0]:
            summed.set()

    def hold(*_: Any) -> None:
        seen.append(summed.wait(60))  # not a hook of ours: a long backward of the first layers

    reducer.streams._sum = noted  # type: ignore[method-assign]
    for module in executor._replicas.modules:
        module[0].register_full_backward_hook(hold)  # type: ignore[index]
    x = data(1).requires_grad_()
    executor.step(x, square)
    assert seen == [True, True]


@pytest.mark.usefixtures("place")
def test_our_hooks_do_not_wait_for_held_side_streams(make_executor: MakeExecutor) -> None:
    """All hooks of a step return although no side stream does anything until backward has ended."""
    executor = make_executor(model(), 3, optimizer=sgd)
    reducer = executor._reducer
    assert reducer is not None
    executor.step(data(0), square)
    gate = threading.Event()

    add = reducer.streams._sum

    def held(live: Any, contributors: Any) -> None:
        assert gate.wait(60)
        add(live, contributors)

    reducer.streams._sum = held  # type: ignore[method-assign]
    complete = reducer.complete

    def opened() -> None:
        gate.set()  # backward has returned in all replicas
        complete()

    reducer.complete = opened  # type: ignore[method-assign]
    executor.step(data(1), square)
    assert_close(executor, trained_alone(2, lambda step: 6))


@pytest.mark.usefixtures("place")
def test_what_replicas_without_rows_have_accumulated_is_reduced(make_executor: MakeExecutor) -> None:
    """Of a model that uses all its parameters, so that buckets are full before backward has ended."""
    alone, executor = model(), make_executor(model(), 3, optimizer=sgd)
    optimizer = sgd(alone.parameters())
    for _ in range(2):
        with executor.no_sync():
            executor.step(data(0), square)
        executor.step(data(1, rows=1), square)
        optimizer.zero_grad()
        (square(alone(data(0)), None) + square(alone(data(1, rows=1)), None)).backward()
        optimizer.step()
    assert_close(executor, alone)


def test_a_reducer_alone_sums_in_the_replicas_order() -> None:
    """((a + b) + c), to the last bit, whoever owns the bucket."""
    values = [1e16, 1.0, -1e16]
    parameters = [[nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(4)] for _ in values]
    with backend_for("cpu") as backend:
        reducer = Reducer(parameters, list("abcd"), slots_on(["cpu"] * 3), {backend.device: backend})
        reducer.begin([0, 1, 2])
        for given, value in zip(parameters, values, strict=True):
            sum((p * value).sum() for p in given).backward()  # type: ignore[union-attr]
        reducer.complete()
        for given in parameters:
            for parameter in given:
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [(1e16 + 1.0) - 1e16] * 3
        reducer.stop()
        reducer.join()
