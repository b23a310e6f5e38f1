"""What ``executor.step`` keeps of ordinary training: schedulers, groups, scaler, autocast, states, odd parameters."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from accelerators import drawn, places
from torch import nn

from pipegraph.errors import PipegraphWarning, ReplicaError
from pipegraph.replicas import Whole

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

pytestmark = pytest.mark.usefixtures("place")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mlp(seed: int = 0, dtype: torch.dtype = torch.double) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def data(rows: int = 6, seed: int = 0, dtype: torch.dtype = torch.double) -> torch.Tensor:
    return drawn(rows, 4, seed=seed, dtype=dtype)


def square(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


def train_alone(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    chosen = optimizer or sgd(model.parameters())
    for step in range(steps):
        chosen.zero_grad()
        square(model(data(seed=step)), None).backward()
        chosen.step()
    return model


def test_gradients_are_none_after_a_step_and_the_result_is_detached(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    result = executor.step(data(), square, outputs=True)
    assert all(parameter.grad is None for given in executor._replicas.parameters for parameter in given)
    assert result.loss.dim() == 0
    assert not result.loss.requires_grad
    assert result.outputs is not None
    assert [tuple(out.shape) for out in result.outputs] == [(3, 2), (3, 2)]
    assert not any(out.requires_grad for out in result.outputs)
    assert result.grad_norm is None


def test_the_scaler_scales_checks_once_and_updates_once(make_executor: MakeExecutor) -> None:
    alone, scaler_alone = (
        mlp(dtype=torch.float32),
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0, growth_interval=3),
    )
    optimizer = sgd(alone.parameters())
    executor = make_executor(mlp(dtype=torch.float32), 2, optimizer=sgd)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0, growth_interval=3)
    for step in range(10):
        x = data(seed=step, dtype=torch.float32)
        if step == 4:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        scaler_alone.scale(square(alone(x), None)).backward()
        scaler_alone.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        scaler_alone.step(optimizer)
        scaler_alone.update()
        result = executor.step(x, square, clip_norm=0.5, scaler=scaler)
        assert scaler.get_scale() == scaler_alone.get_scale()
        if step != 4:
            assert result.grad_norm is not None
            assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        assert_replicas_equal(executor)
    assert_close(executor, alone, 1e-5)


def test_autocast_of_the_caller_holds_in_every_replica(make_executor: MakeExecutor) -> None:
    seen: set[torch.dtype] = set()

    def loss(outputs: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        seen.add(outputs.dtype)
        return outputs.float().pow(2).mean()

    executor = make_executor(mlp(dtype=torch.float32), 2, optimizer=sgd)
    for step in range(3):
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            executor.step(data(seed=step, dtype=torch.float32), loss)
        assert_replicas_equal(executor)
    assert seen == {torch.bfloat16}


class Odd(nn.Module):
    """Frozen, unused, sometimes used, shared and sparse parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(10, 4, sparse=True, dtype=torch.double)
        self.shared = nn.Linear(4, 4, dtype=torch.double)
        self.again = self.shared
        self.frozen = nn.Linear(4, 4, dtype=torch.double).requires_grad_(False)
        self.unused = nn.Linear(4, 4, dtype=torch.double)
        self.rare = nn.Linear(4, 4, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(torch.tanh(self.shared(self.frozen(self.table(x)))))
        return y + self.rare(y) if bool((x == 0).any()) else y


def test_sparse_frozen_shared_unused_and_sometimes_used(make_executor: MakeExecutor) -> None:
    def plain(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    alone = Odd()
    optimizer = plain(alone.parameters())
    executor = make_executor(
        Odd(), places(1) * 3, optimizer=plain
    )  # torch has sparse tensors on a first device only
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        x = torch.randint(1, 10, (7,), generator=generator, device="cpu").to(torch.get_default_device())
        if step % 3 == 1:
            x[6] = 0  # only the last replica uses `rare`
        # The branch is chosen per batch on one device, per part here: so per row, without gradient to the rest.
        optimizer.zero_grad()
        parts = x.split(3)
        sum(square(alone(part), None) * len(part) / 7 for part in parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        executor.step(x, square)
        assert_replicas_equal(executor)
    assert_close(executor, alone)
    assert executor.module.table.weight.grad is None


def test_a_state_moves_between_any_numbers_of_replicas_and_one_device(
    make_executor: MakeExecutor,
) -> None:
    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01, eps=1e-3)

    alone = mlp()
    optimizer = adam(alone.parameters())
    train_alone(alone, 3, optimizer)
    executor = make_executor(mlp(), 3, optimizer=adam)
    for step in range(3):
        executor.step(data(seed=step), square)
    state = copy.deepcopy(executor.state_dict())
    assert set(state) == {"model", "optimizer"}
    assert state["model"].keys() == alone.state_dict().keys()
    # One model and one optimizer of plain torch load it.
    fresh = mlp(seed=9)
    fresh.load_state_dict(state["model"])
    fresh_optimizer = adam(fresh.parameters())
    fresh_optimizer.load_state_dict(state["optimizer"])
    # So does an executor with another number of replicas, and the other way round.
    other = make_executor(mlp(seed=8), 2, optimizer=adam)
    other.load_state_dict(state)
    back = make_executor(mlp(seed=7), 4, optimizer=adam)
    back.load_state_dict({"model": alone.state_dict(), "optimizer": optimizer.state_dict()})
    for step in range(3, 6):
        for given, model in ((optimizer, alone), (fresh_optimizer, fresh)):
            given.zero_grad()
            square(model(data(seed=step)), None).backward()
            given.step()
        for each in (executor, other, back):
            each.step(data(seed=step), square)
            assert_replicas_equal(each)
    for each in (executor, other, back):
        assert_close(each, alone)


def test_batch_norm_statistics_are_the_first_replicas_and_reach_all(make_executor: MakeExecutor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    alone = copy.deepcopy(model)
    executor = make_executor(model, 2, optimizer=sgd)
    for step in range(3):
        executor.step(data(seed=step), square)
        alone(data(seed=step)[:3])  # the first replica sees the first half
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer)
    executor.eval()
    executor.step(data(), square)
    for first, second in zip(*(list(module.buffers()) for module in executor._replicas.modules), strict=True):
        assert torch.equal(first, second)


def test_parameters_written_from_outside_need_sync(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    executor.module[0].weight.data.fill_(0.5)  # moves no version counter
    executor.sync()
    assert_replicas_equal(executor)


def test_captions_and_keys_are_cut_by_rows_and_whole_values_are_not(make_executor: MakeExecutor) -> None:
    seen: dict[int, tuple[list[str], int]] = {}

    def loss(outputs: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
        seen[int(part["x"][0, 0])] = (part["key"], len(part["weights"]))
        return outputs.sum() * 0

    x = torch.zeros(5, 4, dtype=torch.double)
    x[:, 0] = torch.arange(5)
    executor = make_executor(mlp(), 2, optimizer=sgd)
    executor.step(
        {"x": x, "key": list("abcde"), "weights": Whole(torch.ones(9))}, loss, lambda m, part: m(part["x"])
    )
    assert seen == {0: (["a", "b", "c"], 9), 3: (["d", "e"], 9)}


def test_arrays_of_one_dimension_are_cut_where_batches_are_cut_along_another(
    make_executor: MakeExecutor,
) -> None:
    seen: dict[int, list[int]] = {}

    def loss(outputs: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
        seen[int(part["x"][0, 0])] = part["row"].tolist()
        return outputs.sum() * 0

    x = torch.arange(5, dtype=torch.double).expand(4, 5)
    executor = make_executor(mlp(), 2, optimizer=sgd, dim=1)
    executor.step({"x": x, "row": np.arange(5)}, loss, lambda m, part: m(part["x"].T))
    assert seen == {0: [0, 1, 2], 3: [3, 4]}


def test_wrong_losses_are_refused_by_name(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    with pytest.raises(ReplicaError, match=r"0-dim tensor .* got shape \(3, 2\)"):
        executor.step(data(), lambda out, part: out)
    with pytest.raises(ReplicaError, match="got float"):
        executor.step(data(), lambda out, part: 1.0)
    with pytest.raises(ReplicaError, match=r"weight of a loss .* got shape \(2,\)"):
        executor.step(data(), lambda out, part: (out.sum(), torch.ones(2)))
    with pytest.raises(ReplicaError, match="clip_norm must be > 0, got -1"):
        executor.step(data(), square, clip_norm=-1)
    with pytest.raises(ReplicaError, match="reduction must be 'mean' or 'sum', got 'avg'"):
        executor.step(data(), square, reduction="avg")
    with pytest.raises(ReplicaError, match="no tensor with rows"):
        executor.step({"key": ["a"]}, square)
    executor.step(data(), square)


def test_a_model_compiled_before_works_and_says_that_nothing_overlaps(make_executor: MakeExecutor) -> None:
    alone = train_alone(mlp(), 3)
    model: Any = torch.compile(mlp(), backend="aot_eager")
    with pytest.warns(PipegraphWarning, match="overlaps with nothing"):
        executor = make_executor(model, 2, optimizer=sgd)
    for step in range(3):
        executor.step(data(seed=step), square)
    assert executor.module is model
    assert_close_compiled = dict(model._orig_mod.named_parameters())
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(assert_close_compiled[name], expected, rtol=1e-12, atol=1e-12)
    assert executor.state_dict()["model"].keys() == alone.state_dict().keys()
