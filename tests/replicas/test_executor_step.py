"""What ``executor.step`` keeps of ordinary training: schedulers, groups, scaler, autocast, states, odd parameters."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerators import drawn, places
from torch import nn
from torch.nn.functional import cross_entropy

from pipegraph.device.scattered import Scattered
from pipegraph.errors import PipegraphWarning, ReplicaError, StateError
from pipegraph.replicas import ReplicaExecutor, Whole

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


def test_a_scheduler_on_the_first_optimizer_drives_all(make_executor: MakeExecutor) -> None:
    alone = mlp()
    optimizer = sgd(alone.parameters())
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    executor = make_executor(mlp(), 3, optimizer=sgd)
    ours = torch.optim.lr_scheduler.StepLR(executor.optimizer, 2, 0.5)
    for step in range(8):
        optimizer.zero_grad()
        square(alone(data(seed=step)), None).backward()
        optimizer.step()
        theirs.step()
        executor.step(data(seed=step), square)
        ours.step()
        assert_replicas_equal(executor)
    assert_close(executor, alone)


def test_tensor_learning_rates_are_copied_by_value(make_executor: MakeExecutor) -> None:
    executor = make_executor(
        mlp(), 2, optimizer=lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), eps=1e-3)
    )
    executor.step(data(), square)
    executor.optimizer.param_groups[0]["lr"].fill_(0.5)
    executor.step(data(), square)
    first, second = (optimizer.param_groups[0]["lr"] for optimizer in executor._optimizers.each)  # type: ignore
    assert first.item() == second.item() == 0.5
    assert first is not second
    assert_replicas_equal(executor)


def test_groups_by_name_from_the_module(make_executor: MakeExecutor) -> None:
    def by_name(module: nn.Module) -> torch.optim.Optimizer:
        biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in module.named_parameters() if not name.endswith("bias")]
        return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)

    alone = mlp()
    train_alone(alone, 5, by_name(alone))
    executor = make_executor(mlp(), 3, optimizer=by_name)
    for step in range(5):
        executor.step(data(seed=step), square)
    assert_close(executor, alone)


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


def test_an_unused_parameter_is_not_moved_by_weight_decay(make_executor: MakeExecutor) -> None:
    model = Odd()
    model.table = nn.Embedding(10, 4, dtype=torch.double)
    before = copy.deepcopy(model.unused.weight)
    executor = make_executor(model, 2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5))
    for _ in range(3):
        executor.step(torch.arange(1, 7), square)
    assert torch.equal(before, model.unused.weight)


def test_freezing_and_thawing_between_steps(make_executor: MakeExecutor) -> None:
    alone, optimizer = mlp(), None
    executor = make_executor(mlp(), 2, optimizer=sgd)
    optimizer = sgd(alone.parameters())
    for step in range(9):
        for model in (alone, executor.module):
            model[0].requires_grad_(step % 3 != 1)
        optimizer.zero_grad()
        square(alone(data(seed=step)), None).backward()
        optimizer.step()
        executor.step(data(seed=step), square)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


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


def test_a_loaded_state_is_every_replicas_own(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    executor.step(data(), square)
    state = executor.state_dict()
    executor.load_state_dict(state)
    first, second = (next(iter(o.state.values()))["momentum_buffer"] for o in executor._optimizers.each)  # type: ignore
    assert first.data_ptr() != second.data_ptr()


def test_a_state_of_other_groups_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    state = {"model": mlp().state_dict(), "optimizer": sgd(list(mlp().parameters())[:2]).state_dict()}
    with pytest.raises(StateError, match=r"groups of \[2\] parameters, this optimizer of \[4\]"):
        executor.load_state_dict(state)


def test_train_and_eval_reach_every_replica(make_executor: MakeExecutor) -> None:
    executor = make_executor(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)).double(), 2, optimizer=sgd)
    executor.eval()
    x = data()
    torch.testing.assert_close(executor(x), executor.module(x), rtol=1e-12, atol=1e-12)
    executor.module.train()  # directly on the module works too
    warned = pytest.warns(PipegraphWarning, match="one generator")
    with warned if torch.get_default_device().type == "cpu" else nullcontext():
        assert not torch.equal(executor(x), executor.eval().module(x))


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


def test_a_scattered_batch_is_taken_as_it_is(make_executor: MakeExecutor) -> None:
    executor, other = (make_executor(mlp(), 2, optimizer=sgd) for _ in range(2))
    for step in range(3):
        x = data(7, seed=step)
        loss = executor.step(Scattered(x.split([4, 3]), places(2)), square).loss
        assert torch.equal(loss, other.step(x, square).loss)
    for mine, its in zip(executor.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(mine, its)
    with pytest.raises(ReplicaError, match=r"scattered over \['(\w+)\S*, '\1"):
        executor.step(Scattered(data(6).split(2), places(3)), square)


def test_a_step_keeps_nothing_of_its_batch(make_executor: MakeExecutor) -> None:
    import gc
    import weakref

    executor = make_executor(mlp(), 2, optimizer=sgd)
    x = data()
    held = weakref.ref(x.untyped_storage())
    watched = weakref.ref(x)
    executor.step(x, square)
    del x
    gc.collect()
    assert watched() is None
    assert held() is None


def test_threads_are_started_once(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 3, optimizer=sgd)
    executor.step(data(), square)
    before = set(threading.enumerate())
    for step in range(5):
        executor.step(data(seed=step), square)
    assert set(threading.enumerate()) <= before


def test_each_replica_has_its_share_of_the_cores(make_executor: MakeExecutor) -> None:
    widths: list[int] = []

    def loss(outputs: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        widths.append(torch.get_num_threads())
        return outputs.sum()

    torch.set_num_threads(4)
    make_executor(mlp(), 2, optimizer=sgd).step(data(), loss)
    assert widths == [2, 2]
    assert torch.get_num_threads() == 4


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


def test_optimizers_that_cannot_step_over_replicas_are_refused(make_executor: MakeExecutor) -> None:
    with pytest.raises(ReplicaError, match="LBFGS needs a closure"):
        ReplicaExecutor(mlp(), places(1), optimizer=torch.optim.LBFGS)
    other = mlp()
    with pytest.raises(ReplicaError, match="must use the parameters it is given"):
        ReplicaExecutor(mlp(), places(2), optimizer=lambda params: sgd(other.parameters()))
    with pytest.raises(ReplicaError, match=r"step\(\) needs optimizer="):
        make_executor(mlp(), 2).step(data(), square)
    with pytest.raises(ReplicaError, match="optimizer= must make one optimizer, got list"):
        ReplicaExecutor(mlp(), places(2), optimizer=lambda params: [sgd(params)])  # type: ignore[arg-type, return-value]
    executor = make_executor(mlp(), 2, optimizer=sgd)
    executor.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    with pytest.raises(ReplicaError, match="must use the parameters it is given"):
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


def test_batches_may_be_nested_tuples(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    x = data()
    y, target = torch.zeros(6, dtype=torch.long), torch.ones(6, 2, dtype=torch.double)
    expected = cross_entropy(executor.module(x), y) + (executor.module(x) - target).pow(2).mean()
    result = executor.step(
        (x, (y, target)),
        lambda out, part: cross_entropy(out, part[1][0]) + (out - part[1][1]).pow(2).mean(),
        lambda module, part: module(part[0]),
    )
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_loss_that_uses_the_model_in_place_of_its_replica_is_refused(
    make_executor: MakeExecutor, accumulating: bool
) -> None:
    def squares(module: nn.Module) -> torch.Tensor:
        return torch.stack([parameter.pow(2).sum() for parameter in module.parameters()]).sum()

    alone, model = mlp(), mlp()
    executor = make_executor(model, 2, optimizer=sgd)
    for _ in range(5):
        with (
            executor.no_sync() if accumulating else nullcontext(),
            pytest.raises(
                ReplicaError, match=r"loss of replica 1 uses parameter '\d.\w+' of replica 0: .* forward="
            ),
        ):
            executor.step(data(), lambda outputs, part: square(outputs, part) + squares(model))
    optimizer = sgd(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        (square(alone(data(seed=step)), None) + squares(alone)).backward()
        optimizer.step()
        executor.step(
            data(seed=step),
            lambda made, part: square(made[0], part) + made[1],
            lambda module, part: (module(part), squares(module)),
        )
    assert_close(executor, alone)
