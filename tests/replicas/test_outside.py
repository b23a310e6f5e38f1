"""What users do outside ``step``: their own backwards, what they set on the module, an executor that is gone."""

from __future__ import annotations

import copy
import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerators import drawn, on_the_cpu, places
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

pytestmark = pytest.mark.usefixtures("place")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data(rows: int = 7) -> torch.Tensor:
    return drawn(rows, 4)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def assert_same_gradients(executor: ReplicaExecutor, alone: nn.Module) -> None:
    for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        if its.grad is not None:
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-13)


# Backwards


def test_a_penalty_on_the_gradient_of_inputs_reaches_all_replicas(make_executor: MakeExecutor) -> None:
    alone, executor = mlp(), make_executor(mlp(), 3)
    for model in (alone, executor):
        x = data().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)  # type: ignore[operator]
        slope.pow(2).sum().backward()
    assert_same_gradients(executor, alone)


def test_a_loss_on_activations_that_a_hook_has_stored_reaches_all_replicas(
    make_executor: MakeExecutor,
) -> None:
    alone, executor = mlp(), make_executor(mlp(), places(2))
    stored: list[torch.Tensor] = []
    for model in (alone, executor.module):
        model[1].register_forward_hook(lambda module, given, out: stored.append(out))
    for called in (alone, executor):
        stored.clear()
        called(data())  # type: ignore[operator]
        sum(one.pow(2).sum() for one in stored).backward()  # type: ignore[union-attr]
    assert_same_gradients(executor, alone)


def test_a_backward_of_fewer_replicas_than_before_and_of_more(make_executor: MakeExecutor) -> None:
    alone, executor = mlp(), make_executor(mlp(), 3)
    for rows in (7, 1, 2, 7):
        for model in (alone, executor):
            first, second = model(data(rows)), model(data(1))  # type: ignore[operator]
            first.sum().backward()
            second.pow(2).sum().backward()
    assert_same_gradients(executor, alone)


def test_a_backward_made_in_the_forward_is_summed(make_executor: MakeExecutor) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.net(x).pow(2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach().expand(len(x))

    alone, executor = Own(), make_executor(Own(), 3)
    alone(data())
    executor(data())
    assert_same_gradients(executor, alone)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_returned_for_parameters_are_refused(
    make_executor: MakeExecutor, create_graph: bool
) -> None:
    executor = make_executor(mlp(), 2)
    loss = executor(data()).sum()
    with pytest.raises(ReplicaError, match=r"autograd.grad .* first replica's share: use backward\(\)"):
        torch.autograd.grad(loss, list(executor.module.parameters()), create_graph=create_graph)
    executor(data()).sum().backward()


def test_a_backward_into_named_inputs_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2)
    with pytest.raises(ReplicaError, match=r"replica 1 none: backward\(inputs=...\)"):
        executor(data()).sum().backward(inputs=list(executor.module.parameters()))


# What is set on the module between calls


class Scaled(nn.Module):
    """With plain attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.double))
        self.temperature = 1.0
        self.options = {"nested": [1.0]}
        self.shift = torch.zeros(4, dtype=torch.double)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scale: float = self.temperature * self.options["nested"][0]
        return x * self.weight * scale + self.shift


def test_what_is_set_on_the_module_holds_for_all_replicas(make_executor: MakeExecutor) -> None:
    executor = make_executor(Scaled(), 3)
    module, x = executor.module, data(6)

    def assert_followed() -> None:
        assert torch.equal(executor(x), module(x))

    assert_followed()
    module.temperature = 3.0
    assert_followed()
    module.options["nested"][0] = 5.0
    assert_followed()
    module.shift.fill_(7.0)
    assert_followed()
    module.shift = torch.full((4,), -1.0, dtype=torch.double)
    assert_followed()
    handle = module.register_forward_hook(lambda module, given, out: out * 2)
    assert_followed()
    handle.remove()
    assert_followed()
    module.forward = type(module).forward.__get__(module)
    assert_followed()
    assert module.weight is not executor._replicas.modules[1].weight


def test_what_a_forward_sets_stays_on_its_replica(make_executor: MakeExecutor) -> None:
    executor = make_executor(Scaled(), 2)
    executor(data(6))
    executor.module.calls = 10
    executor(data(6))
    executor(data(1))
    executor(data(6))
    assert [module.calls for module in executor._replicas.modules] == [13, 12]


def test_dropout_probabilities_and_modes_are_followed(make_executor: MakeExecutor) -> None:
    executor = make_executor(nn.Dropout(0.5), 2, deterministic=True)
    executor.module.p = 1.0
    assert executor(torch.ones(4, 4)).sum() == 0
    executor.module.eval()
    assert executor(torch.ones(4, 4)).sum() == 16


def test_what_cannot_be_copied_to_the_replicas_is_named(make_executor: MakeExecutor) -> None:
    executor = make_executor(Scaled(), 2)
    executor.module.lock = threading.Lock()
    with pytest.raises(ReplicaError, match=r"Scaled.lock was set after the executor was built"):
        executor(data())


def test_parameters_loaded_later_are_seen_in_eval(make_executor: MakeExecutor) -> None:
    for options in ({}, {"optimizer": sgd}):
        executor = make_executor(nn.Linear(4, 1), 2, **options)
        executor.eval()
        x = torch.ones(2, 4)
        executor(x)
        nn.init.constant_(executor.module.weight, 5.0)
        out = executor(x)
        assert torch.equal(out[0], out[1])
        executor.module.load_state_dict(nn.Linear(4, 1).state_dict())
        out = executor(x)
        assert torch.equal(out[0], out[1])


def test_a_converted_model_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2)
    executor.module.float()
    with pytest.raises(ReplicaError, match=r"parameter '0.weight' is now torch.float32"):
        executor(data().float())


# The end


@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_backward_after_the_end_is_an_error_and_does_not_hang(how: str) -> None:
    executor = ReplicaExecutor(mlp(), places(2))
    out = executor(data())
    if how == "close":
        executor.close()
    del executor
    gc.collect()
    with pytest.raises(ReplicaError, match="closed, or nobody held it"):
        out.sum().backward()


def test_close_from_another_thread_waits_for_the_step(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    inside, go = threading.Event(), threading.Event()

    def loss(outputs: torch.Tensor, part: Any) -> torch.Tensor:
        inside.set()
        go.wait()
        return outputs.sum()

    step = threading.Thread(target=executor.step, args=(data(), loss), daemon=True)
    step.start()
    assert inside.wait(60)
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    go.set()
    step.join(60)
    closing.join(60)
    assert not step.is_alive()
    assert not closing.is_alive()
    with pytest.raises(ReplicaError, match="closed"):
        executor.step(data(), loss)


@pytest.mark.parametrize("slots", [1, 2])
def test_close_from_inside_a_loss_is_refused(make_executor: MakeExecutor, slots: int) -> None:
    executor = make_executor(mlp(), slots, optimizer=sgd)

    def loss(outputs: torch.Tensor, part: Any) -> torch.Tensor:
        executor.close()
        return outputs.sum()

    with pytest.raises(ReplicaError, match="in use"):
        executor.step(data(), loss)
    executor.step(data(), lambda outputs, part: outputs.sum())


FORKED = """
import os
import torch
from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor

def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

def gradients(model):
    return [each.grad for each in model.parameters()]

data = torch.randn(6, 4)
executor = ReplicaExecutor(mlp(), ["cpu"] * 2, optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
executor(data).sum().backward()
alone = mlp()
alone(data).sum().backward()
child = os.fork()
if child == 0:
    status = 1
    try:
        executor.module.zero_grad()
        executor.module(data).sum().backward()
        for mine, its in zip(gradients(executor.module), gradients(alone), strict=True):
            torch.testing.assert_close(mine, its)
        try:
            executor(data)
        except ReplicaError as error:
            assert "another process" in str(error)
            executor.close()
            status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
executor.step(data, lambda outputs, part: outputs.sum())
executor.close()
"""


@on_the_cpu
def test_a_forked_child_is_refused_and_its_model_is_a_plain_one(programs: Any) -> None:
    """In a process that sees no GPU: with an accelerator torch refuses a backward in a forked child."""
    ended = programs.run(FORKED, env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr


# executor.optimizer


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, eps=1e-3)


def loss_of(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


@pytest.mark.parametrize("shard", [False, True])
def test_a_loop_of_ones_own_with_the_executors_optimizer_equals_one_device(
    make_executor: MakeExecutor, shard: bool
) -> None:
    alone = mlp()
    optimizer = adam(alone.parameters())
    executor = make_executor(mlp(), 3, optimizer=adam, shard_optimizer=shard)
    ours = torch.optim.lr_scheduler.StepLR(executor.optimizer, 2, 0.5)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for rows in (7, 1, 5, 7):
        for model, each in ((alone, optimizer), (executor, executor.optimizer)):
            each.zero_grad()
            model(data(rows)).pow(2).mean().backward()  # type: ignore[operator]
            each.step()
        assert_same_gradients(executor, alone)
        assert_replicas_equal(executor)
        ours.step()
        theirs.step()
    executor.optimizer.zero_grad()
    optimizer.zero_grad()
    loss_of(alone(data()), None).backward()
    optimizer.step()
    executor.step(data(), loss_of)
    assert_close(executor, alone)


@pytest.mark.parametrize("shard", [False, True])
def test_what_is_done_to_the_optimizer_is_done_to_all(make_executor: MakeExecutor, shard: bool) -> None:
    alone = mlp()
    optimizer = adam(alone.parameters())
    executor = make_executor(mlp(), 3, optimizer=adam, shard_optimizer=shard)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(alone(data()), None).backward()
            optimizer.step()
            executor.step(data(), loss_of)
            assert_replicas_equal(executor)

    train(2)
    saved = optimizer.state_dict()
    executor.optimizer.load_state_dict(saved)
    train(1)
    for each in (optimizer, executor.optimizer):
        each.state.clear()
    assert executor.state_dict()["optimizer"]["state"] == {}
    train(1)
    for model, each in ((alone, optimizer), (executor.module, executor.optimizer)):
        each.state[next(model.parameters())]["exp_avg"].zero_()
        each.param_groups[0]["lr"] = 0.1
    train(2)
    assert isinstance(executor.optimizer, torch.optim.Optimizer)
    assert len(executor.optimizer.param_groups[0]["params"]) == 4
    assert_close(executor, alone)


def test_methods_and_attributes_of_the_optimizer_are_those_of_all(make_executor: MakeExecutor) -> None:
    class Counting(torch.optim.SGD):
        counts = 0
        factor = 1.0

        def count(self) -> int:
            self.counts += 1
            return self.counts

    executor = make_executor(mlp(), 2, optimizer=lambda given: Counting(given, lr=0.1))
    optimizer, each = executor.optimizer, executor._optimizers.parts[0].each
    seen: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *_: seen.append("post")),
    ]
    executor(data()).sum().backward()
    assert optimizer.step(lambda: 7.0) == 7.0
    assert sorted(seen) == ["post"] * 2 + ["pre"] * 2
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 4
    assert optimizer.count() == 1 and [one.counts for one in each] == [1, 1]
    optimizer.factor = 2.0
    assert [one.factor for one in each] == [2.0, 2.0] and optimizer.factor == 2.0
    assert repr(optimizer) == "<Counting on 2 replicas>"
    first = executor.module[0].weight
    optimizer.state[first] = {"kept": 1}
    assert first in optimizer.state and len(optimizer.state) >= 1
    del optimizer.state[first]
    assert first not in optimizer.state
    with pytest.raises(ReplicaError, match=r"optimizer.state cannot be exchanged: .*load_state_dict\(\)"):
        optimizer.state = {}
    with pytest.raises(ReplicaError, match=r"cannot be copied or pickled: use its state_dict\(\)"):
        copy.deepcopy(optimizer)


def test_a_refused_state_leaves_the_replicas_alike(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    state = executor.state_dict()
    other = mlp().state_dict()
    other["0.weight"] = torch.full((8, 4), 9.0, dtype=torch.double)
    other["extra"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="extra"):
        executor.load_state_dict({**state, "model": other})
    assert_replicas_equal(executor)
    executor.step(data(), loss_of)
    assert_replicas_equal(executor)


# Rows


def test_a_scattered_batch_of_captions_alone_gives_a_mean(make_executor: MakeExecutor) -> None:
    from pipegraph.device.scattered import Scattered

    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.double))

        def forward(self, captions: list[str]) -> torch.Tensor:
            return self.weight * torch.tensor([float(len(one)) for one in captions])

    captions = ["a", "bb", "ccc", "dddd", "eeeee"]
    executor = make_executor(Lengths(), 2, optimizer=sgd)
    batch = Scattered([captions[:3], captions[3:]], places(2))
    assert executor.step(batch, lambda outputs, part: outputs.mean()).loss.item() == 3.0
    odd = Scattered([{"a": [1, 2], "b": [1]}, {"a": [1], "b": [1]}], places(2))
    with pytest.raises(ReplicaError, match="how many rows"):
        executor.step(odd, lambda outputs, part: outputs.mean(), lambda module, part: module(["a"]))


def test_what_is_changed_in_place_inside_an_attribute_is_followed(make_executor: MakeExecutor) -> None:
    class Slotted:
        __slots__ = ("factor",)

        def __init__(self) -> None:
            self.factor = 1.0

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.double))
            self.array = np.ones(4)
            self.recent = deque([1.0], maxlen=1)
            self.slotted = Slotted()
            self.shift = torch.zeros(4, dtype=torch.double)
            self.named = np.array([[1.0]], dtype=object)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.recent[0] * self.slotted.factor * self.named[0, 0][0]
            return x * self.weight * torch.from_numpy(self.array).to(x.device) * scale + self.shift

    model = Holding()
    model.named[0, 0] = [1.0]
    executor, x = make_executor(model, 3), data(6)
    changes: list[Callable[[], object]] = [
        lambda: model.array.fill(2.0),
        lambda: model.recent.append(3.0),
        lambda: setattr(model.slotted, "factor", 5.0),
        lambda: model.shift.fill_(7.0),
        lambda: model.named[0, 0].append(model.named[0, 0].pop() + 1),
    ]
    if x.device.type == "cpu":  # the bytes of other memory are not looked at
        changes += [lambda: model.shift.data.fill_(8.0), lambda: model.shift.numpy().fill(9.0)]
    for change in changes:
        change()
        assert torch.equal(executor(x), model(x))


def test_buffers_that_come_go_and_are_none_are_followed(make_executor: MakeExecutor) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.double))
            self.register_buffer("shift", torch.ones(4, dtype=torch.double))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = getattr(self, "late", None)
            shift = getattr(self, "shift", None) if shift is None else shift
            return x * self.weight if shift is None else x * self.weight + shift

    executor, x = make_executor(Shifted(), 3), data(6)
    model = executor.module

    def assert_followed() -> None:
        assert torch.equal(executor(x), model(x))

    assert_followed()
    model.shift = None
    assert_followed()
    model.shift = torch.full((4,), 2.0, dtype=torch.double)
    assert_followed()
    del model.shift
    assert_followed()
    model.register_buffer("late", torch.full((4,), 3.0, dtype=torch.double), persistent=False)
    model.held = [model.late]
    assert_followed()
    assert all(m.held[0] is m.late for m in executor._replicas.modules)
    assert all(m._non_persistent_buffers_set == {"late"} for m in executor._replicas.modules)


def test_buffers_that_require_grad_are_refused(make_executor: MakeExecutor) -> None:
    class Net(nn.Module):
        def __init__(self, grad: bool) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4, dtype=torch.double).requires_grad_(grad))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with pytest.raises(ReplicaError, match="buffer 'scale' requires grad"):
        ReplicaExecutor(Net(True), places(2))
    executor = make_executor(Net(False), 2)
    executor.module.scale.requires_grad_()
    with pytest.raises(
        ReplicaError, match=r"buffer 'Net.scale' requires grad, .*: make it a Parameter, or detach"
    ):
        executor(data(6))


@pytest.mark.parametrize("accumulated", [False, True])
def test_tensor_hooks_on_parameters_after_the_build_are_refused(
    make_executor: MakeExecutor, accumulated: bool
) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    weight = executor.module[0].weight
    outputs = executor(data())
    if accumulated:
        handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    else:
        handle = weight.register_hook(lambda grad: grad * 2)
    for attempt in (lambda: outputs.sum().backward(), lambda: executor.step(data(), loss_of)):
        with pytest.raises(ReplicaError, match=r"'0.weight' was given a tensor hook .*: remove it"):
            attempt()
    handle.remove()
    executor.zero_grad()
    executor.step(data(), loss_of)


def test_a_model_with_gradients_is_refused_where_the_executor_steps(make_executor: MakeExecutor) -> None:
    model = mlp()
    model(data()).sum().backward()
    with pytest.raises(ReplicaError, match=r"'0.weight' holds a gradient, .* call zero_grad\(\)"):
        ReplicaExecutor(model, places(2), optimizer=sgd)
    model.zero_grad()
    make_executor(model, 2, optimizer=sgd)


@pytest.mark.parametrize("shard", [False, True])
def test_a_parameter_taken_out_of_its_group_is_taken_out_for_all(
    make_executor: MakeExecutor, shard: bool
) -> None:
    alone = mlp()
    optimizer = sgd(alone.parameters())
    executor = make_executor(mlp(), 3, optimizer=sgd, shard_optimizer=shard)
    for step in range(6):
        if step == 3:
            for each in (optimizer, executor.optimizer):
                del each.param_groups[0]["params"][1:3]
        alone.zero_grad()
        loss_of(alone(data()), None).backward()
        optimizer.step()
        executor.step(data(), loss_of)
        executor._exchange.settle()
        assert_close(executor, alone)
        for given in executor._replicas.parameters[1:]:
            for mine, its in zip(given, executor.module.parameters(), strict=True):
                assert torch.equal(mine.cpu(), its.cpu())
    executor.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(1)))
    with pytest.raises(ReplicaError, match="param_groups were given a parameter that optimizer= did not"):
        executor.step(data(), loss_of)


def test_an_embedding_that_renormalises_itself_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(nn.Embedding(4, 2), 2)
    executor.module.max_norm = 1.0
    with pytest.raises(ReplicaError, match="embedding 'at the top' has max_norm=1.0"):
        executor(torch.arange(4))
    with pytest.raises(ReplicaError, match=r"embedding '0' has max_norm=1.0: .* set max_norm to None"):
        ReplicaExecutor(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), places(2))


def test_a_later_pruning_is_refused_by_name(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2)
    prune.l1_unstructured(executor.module[0], "weight", amount=0.5)
    with pytest.raises(
        ReplicaError, match=r"has changed since the executor was built, at '0.weight'.* \(pruning"
    ):
        executor(data())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_tangents_pass_through(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(data(), torch.ones_like(data()))
        mine, its = (forward_ad.unpack_dual(model(x)).tangent for model in (executor, executor.module))
        torch.testing.assert_close(mine, its)
