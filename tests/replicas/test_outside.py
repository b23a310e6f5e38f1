"""What users do outside ``step``: their own backwards, what they set on the module, the executor's end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import drawn, on_the_cpu, places
from torch import nn
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


def test_what_is_set_on_the_module_holds_for_the_next_call(make_executor: MakeExecutor) -> None:
    executor = make_executor(nn.Dropout(0.5), 2, deterministic=True)
    executor.module.p = 1.0
    assert executor(torch.ones(4, 4)).sum() == 0
    executor.module.eval()
    assert executor(torch.ones(4, 4)).sum() == 16


def test_gradients_of_ones_own_are_added_to_those_of_a_step(make_executor: MakeExecutor) -> None:
    alone, executor = mlp(), make_executor(mlp(), 2, optimizer=sgd)
    optimizer = sgd(alone.parameters())
    for _ in range(3):
        for model in (alone, executor):
            model(data()).sum().backward()  # type: ignore[operator]
        loss_of(alone(data()), None).backward()
        optimizer.step()
        optimizer.zero_grad()
        executor.step(data(), loss_of)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


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


def test_sync_copies_what_was_set_on_the_module(make_executor: MakeExecutor) -> None:
    executor, x = make_executor(Scaled(), 3, optimizer=lambda given: torch.optim.SGD(given, lr=0.0)), data(6)
    model = executor.module

    def assert_same() -> None:
        executor.sync()
        made = executor.step(x, loss_of, outputs=True).outputs
        assert made is not None
        assert torch.equal(torch.cat([each.to(x.device) for each in made]), model(x))

    assert_same()
    model.options["nested"][0] = 5.0
    assert_same()
    nn.init.constant_(model.weight, 3.0)
    assert_same()
    handle = model.register_forward_hook(lambda module, given, out: out * 2)
    assert_same()
    handle.remove()
    assert_same()
    model.shift = None
    assert_same()
    model.shift = torch.full((4,), 2.0, dtype=torch.double)
    assert_same()
    del model.shift
    assert_same()
    model.register_buffer("late", torch.full((4,), 3.0, dtype=torch.double), persistent=False)
    model.held = [model.late]
    executor.sync()
    assert all(m.held[0] is m.late for m in executor._replicas.modules)
    assert all(m._non_persistent_buffers_set == {"late"} for m in executor._replicas.modules)
    model.lock = threading.Lock()
    with pytest.raises(ReplicaError, match=r"Scaled.lock was set after the executor was built"):
        executor.sync()


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


def test_a_converted_model_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    executor.module.float()
    with pytest.raises(ReplicaError, match=r"parameter '0.weight' is now torch.float32"):
        executor.sync()


def test_buffers_that_require_grad_are_refused() -> None:
    model = Scaled()
    model.shift.requires_grad_()
    with pytest.raises(
        ReplicaError, match=r"buffer 'shift' requires grad, .*: make it a Parameter, or detach"
    ):
        ReplicaExecutor(model, places(2), optimizer=sgd)


def test_an_embedding_that_renormalises_itself_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor(nn.Embedding(4, 2), 2, optimizer=sgd)
    executor.module.max_norm = 1.0
    with pytest.raises(ReplicaError, match="embedding 'at the top' has max_norm=1.0"):
        executor.step(torch.arange(4), loss_of)
    with pytest.raises(ReplicaError, match=r"embedding '0' has max_norm=1.0: .* set max_norm to None"):
        ReplicaExecutor(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), places(2), optimizer=sgd)


def test_a_later_pruning_is_refused_by_name(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2, optimizer=sgd)
    prune.l1_unstructured(executor.module[0], "weight", amount=0.5)
    with pytest.raises(
        ReplicaError, match=r"has changed since the executor was built, at '0.weight'.* \(pruning"
    ):
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


def test_a_module_that_synchronises_its_statistics_is_refused() -> None:
    with pytest.raises(ReplicaError, match=r"module '0' \(SyncBatchNorm\) would synchronise nothing"):
        ReplicaExecutor(nn.Sequential(nn.SyncBatchNorm(4)), places(2), optimizer=sgd)


# The end


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


def test_a_model_with_gradients_is_refused_where_the_executor_steps(make_executor: MakeExecutor) -> None:
    model = mlp()
    model(data()).sum().backward()
    with pytest.raises(ReplicaError, match=r"'0.weight' holds a gradient, .* call zero_grad\(\)"):
        ReplicaExecutor(model, places(2), optimizer=sgd)
    model.zero_grad()
    make_executor(model, 2, optimizer=sgd)
