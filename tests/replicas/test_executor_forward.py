"""``executor(...)``: what DataParallel's users rely on."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerators import drawn, on_the_accelerator, on_the_cpu, places
from torch import nn

from pipegraph.device.scattered import Scattered
from pipegraph.errors import PipegraphWarning, ReplicaError
from pipegraph.replicas import ReplicaExecutor
from pipegraph.replicas.runner import warn_if_unequal

from .conftest import MakeExecutor

pytestmark = pytest.mark.usefixtures("place")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def data(rows: int = 7) -> torch.Tensor:
    return drawn(rows, 4)


class Arguments(nn.Module):
    """Says what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {"rows": torch.tensor([len(args)]), "kwargs": torch.tensor([len(kwargs)])}


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


def test_no_inputs_are_one_call_and_inputs_without_rows_go_to_all(make_executor: MakeExecutor) -> None:
    executor = make_executor(Arguments(), 3)
    assert executor()["rows"].tolist() == [0]
    assert executor("text", flag=True)["rows"].tolist() == [1, 1, 1]
    assert executor("text", flag=True)["kwargs"].tolist() == [1, 1, 1]


def test_the_other_dimension(make_executor: MakeExecutor) -> None:
    executor = make_executor(nn.Identity(), 2, dim=1)
    x = torch.randn(2, 5)
    assert torch.equal(executor(x), x)


def test_losses_from_forward_become_a_vector(make_executor: MakeExecutor) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    with pytest.warns(PipegraphWarning, match="0-dim"):
        assert make_executor(Loss(), 2)(torch.ones(4)).tolist() == [2.0, 2.0]
    assert make_executor(Loss(), 1)(torch.ones(4)).dim() == 0


def test_a_scattered_batch_is_the_only_argument(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2)
    x = data(5)
    torch.testing.assert_close(
        executor(Scattered(x.split(3), places(2))), executor.module(x), rtol=1e-12, atol=0
    )


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


def test_two_forwards_before_a_backward_and_two_backwards(make_executor: MakeExecutor) -> None:
    alone, executor = mlp(), make_executor(mlp(), 2)
    for model in (alone, executor):
        first, second = model(data(4)), model(data(6))  # type: ignore[operator]
        (first.sum() + second.pow(2).sum()).backward()
        model(data(3)).sum().backward()  # type: ignore[operator]
    for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-13)


def test_gradients_reach_inputs_that_need_them(make_executor: MakeExecutor) -> None:
    x = data(5).requires_grad_()
    other = data(5).requires_grad_()
    executor = make_executor(mlp(), 3)
    executor(x).pow(2).sum().backward()
    executor.module(other).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-13)


def test_every_call_sees_the_models_parameters_as_they_are(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 3)
    for step in range(3):
        with torch.no_grad():
            for parameter in executor.module.parameters():
                parameter.data.mul_(0.5 + step)  # moves no version counter
        torch.testing.assert_close(executor(data()), executor.module(data()), rtol=1e-12, atol=1e-12)
    executor.module[2].weight.data.fill_(0.3)
    executor.eval()
    for value in (0.4, 0.5):
        torch.testing.assert_close(executor(data()), executor.module(data()), rtol=1e-12, atol=1e-12)
        executor.module[0].weight.data.fill_(value)  # loaded or trained later, still in eval
    torch.testing.assert_close(executor(data()), executor.module(data()), rtol=1e-12, atol=1e-12)


def test_inference_and_no_grad_of_the_caller_hold(make_executor: MakeExecutor) -> None:
    executor = make_executor(mlp(), 2)
    with torch.no_grad():
        assert not executor(data()).requires_grad
    with torch.inference_mode():
        assert executor(data()).is_inference()
    assert executor(data()).requires_grad


def test_parameters_are_found_in_every_replica(make_executor: MakeExecutor) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([len(list(self.parameters()))])

    assert make_executor(Counting(), 2)(data()).tolist() == [4, 4]


# What is refused, and what is said


def test_parameters_elsewhere_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1, device="meta")})
    with pytest.raises(
        ReplicaError, match=r"'b.weight' is on meta, .* first device, (\S+): model.to\('\1'\)"
    ):
        ReplicaExecutor(model, places(2))


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.ModuleDict({"inner": nn.Linear(1, 1)})
    model["inner"].lock = threading.Lock()
    with pytest.raises(ReplicaError, match=r"attribute 'inner.lock' of type lock .*cannot pickle"):
        ReplicaExecutor(model, places(2), optimizer=sgd)


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


def test_a_changed_module_tree_is_an_error(make_executor: MakeExecutor) -> None:
    def loss(outputs: torch.Tensor, part: Any) -> torch.Tensor:
        return outputs.sum()

    executor = make_executor(mlp(), 2, optimizer=sgd)
    executor.step(data(), loss)
    executor.module[1] = nn.ReLU()
    with pytest.raises(ReplicaError, match=r"tree has changed .* at '1'"):
        executor.step(data(), loss)
    other = make_executor(mlp(), 2, optimizer=sgd)
    other.module[0].weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.double))
    with pytest.raises(ReplicaError, match=r"at '0.weight'"):
        other.step(data(), loss)


def test_sharing_subclasses_attributes_and_strides_survive_the_copy(make_executor: MakeExecutor) -> None:
    class Own(nn.Parameter):
        pass

    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Conv2d(2, 2, 3)})
    model["b"].weight = model["a"].weight
    model["a"].bias = Own(torch.zeros(3))
    model["a"].bias.tag = ["decay"]
    model["c"].weight.data = model["c"].weight.data.to(memory_format=torch.channels_last)
    copied: Any = make_executor(model, 2, optimizer=sgd)._replicas.modules[1]
    assert copied["a"].weight is copied["b"].weight
    assert type(copied["a"].bias) is Own
    assert copied["a"].bias.tag == ["decay"]
    assert copied["a"].bias.tag is not model["a"].bias.tag
    assert copied["c"].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(parameter.is_leaf for parameter in copied.parameters())


def test_unequal_devices_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {torch.device("cuda", 0): 60, torch.device("cuda", 1): 100, torch.device("cuda", 2): 100}

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=memory[device], multi_processor_count=100)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    small, large, other = memory
    with pytest.warns(PipegraphWarning, match=r"differ in memory \(cuda:0: 60, cuda:1: 100\).*below 0.75"):
        warn_if_unequal([small, large])
    warn_if_unequal([large, other])


@on_the_cpu
def test_random_numbers_from_a_shared_generator_are_warned_of_once(make_executor: MakeExecutor) -> None:
    executor = make_executor(nn.Dropout(0.5), 2)
    with pytest.warns(PipegraphWarning, match="one generator"):
        executor(torch.ones(4, 4))
    executor(torch.ones(4, 4))
    deterministic = make_executor(nn.Dropout(0.5), 2, deterministic=True)
    deterministic(torch.ones(4, 4))


@on_the_accelerator
def test_replicas_of_one_accelerator_draw_the_same_numbers_every_time(make_executor: MakeExecutor) -> None:
    """One after another."""
    runs = []
    for _ in range(2):
        executor = make_executor(nn.Dropout(0.5), 2)
        torch.manual_seed(5)
        runs.append(executor(torch.ones(4, 64)))
    assert torch.equal(*runs)


def test_an_executor_is_used_by_one_caller_at_a_time(make_executor: MakeExecutor) -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return executors[0](x)  # type: ignore[no-any-return]

    executors: list[ReplicaExecutor] = []
    executors.append(make_executor(Nested(), 2))
    with pytest.raises(ReplicaError, match="in use"):
        executors[0](torch.ones(4))


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


def test_an_executor_nobody_holds_ends_its_threads() -> None:
    executor = ReplicaExecutor(mlp(), places(2), optimizer=sgd)
    executor.step(data(), lambda out, part: out.sum())
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("pipegraph-")]
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join()
