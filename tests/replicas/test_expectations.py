"""What users of DataParallel bring along: states, optimizers, autocast, containers, devices, interrupts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerators import drawn, places
from torch import nn

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.device.opening import every_device
from pipegraph.replicas import (
    ReplicaExecutor,
    Whole,
)

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


def test_a_whole_value_and_arrays_pass_through_the_terminal_scatter(make_executor: MakeExecutor) -> None:
    graph = pg.Graph("train")
    batches = graph.add(ops.FromSequence([{"x": torch.ones(4), "n": i} for i in range(5)])).then(ops.Batch(5))
    batches.then(
        lambda batch: {**batch, "w": Whole(torch.ones(9)), "ids": np.arange(5), "names": list("abcde")}
    ).then(ops.Scatter(places(2)))
    with graph.loader() as loader:
        (scattered,) = loader
    assert [len(part["w"]) for part in scattered] == [9, 9]
    assert [part["ids"].tolist() for part in scattered] == [[0, 1, 2], [3, 4]]

    class Seen(nn.Linear):
        def forward(self, batch: Any) -> Any:
            found.append((batch["names"], batch["ids"].tolist(), len(batch["w"])))
            return super().forward(batch["x"])

    found: list[Any] = []
    executor = make_executor(Seen(4, 1), 2, optimizer=sgd)
    with executor.no_sync():
        executor.step(
            {"x": torch.ones(5, 4), "w": Whole(torch.ones(9)), "ids": np.arange(5), "names": list("abcde")},
            lambda outputs, part: outputs.mean(),
        )
    assert sorted(found) == [(["a", "b", "c"], [0, 1, 2], 9), (["d", "e"], [3, 4], 9)]


def test_a_run_continues_with_another_number_of_slots() -> None:
    def graph(slots: int) -> pg.Graph:
        made = pg.Graph("train")
        made.add(ops.FromSequence(list(range(8)))).then(ops.Batch(2)).then(ops.Scatter(places(slots)))
        return made

    with graph(2).loader() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with graph(1).loader() as loader:
        loader.load_state_dict(state)
        assert [int(batch[0][0]) for batch in loader] == [2, 4, 6]


# States and optimizers


def test_autocast_around_a_step_ends_before_the_backward_and_the_optimizer(
    make_executor: MakeExecutor,
) -> None:
    seen: list[tuple[str, bool]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(("step", torch.is_autocast_enabled("cpu")))
            return super().step(closure)

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(("backward", bool((grad @ grad.T).dtype == torch.bfloat16)))
            return grad

    for slots in (1, 2):
        executor = make_executor(mlp(torch.float32), slots, optimizer=lambda p: Watched(p, lr=0.1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            executor.step(
                data(dtype=torch.float32),
                lambda out, part: out.float().pow(2).mean(),
                lambda module, part: Watch.apply(module(part)),
            )
    assert {("forward", True), ("step", False)} <= set(seen)
    assert ("step", True) not in seen


# Copies, waits and devices


def test_all_gpus_are_the_default(make_executor: MakeExecutor) -> None:
    executor = ReplicaExecutor(mlp().to(every_device()[0]))
    try:
        assert [slot.device for slot in executor._runner.slots] == every_device()
    finally:
        executor.close()


def test_gradients_live_in_their_buckets_while_backward_runs(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    reducer = executor._reducer
    assert reducer is not None
    complete, shared = reducer.complete, []

    def looked() -> None:
        for live in reducer._layout.buckets:
            for replica, views in enumerate(live.views):
                for index, view in views.items():
                    grad = executor._replicas.parameters[replica][index].grad
                    shared.append(grad is not None and grad.data_ptr() == view.data_ptr())
        complete()

    reducer.complete = looked  # type: ignore[method-assign]
    executor.step(data(), square)
    assert len(shared) == 8
    assert all(shared)
