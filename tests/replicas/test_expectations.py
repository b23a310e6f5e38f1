"""What users of DataParallel bring along: states, optimizers, autocast, containers, devices, interrupts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from accelerators import drawn, on_the_accelerator, on_the_cpu, places
from torch import nn

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.device.accelerator import AcceleratorEvent
from pipegraph.device.backend import slots_on
from pipegraph.device.opening import backend_for, every_device
from pipegraph.errors import DeviceError
from pipegraph.replicas import (
    ReplicaExecutor,
    Whole,
    build,
    executor,
    gather,
    reduce_add_coalesced,
)
from pipegraph.replicas.buckets import plan_buckets
from pipegraph.replicas.feed import from_another_gpu
from pipegraph.replicas.reduce_streams import ReduceStreams

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

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


def test_a_scattered_batch_with_a_whole_value_of_another_length_is_stepped_with(
    make_executor: MakeExecutor,
) -> None:
    graph = pg.Graph("train")
    batches = graph.add(ops.FromSequence([{"x": row} for row in data(5)])).then(ops.Batch(5))
    batches.then(lambda batch: {**batch, "w": Whole(torch.ones(9))}).then(ops.Scatter(places(2)))
    executor, plain = (make_executor(mlp(), 2, optimizer=sgd) for _ in range(2))
    with graph.loader() as loader:
        for batch in loader:
            loss = executor.step(
                batch, square, lambda module, part: module(part["x"]) * part["w"].mean()
            ).loss
    assert torch.equal(loss, plain.step(data(5), square).loss)


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


class Cache:
    """As a cache of keys and values: made from pairs, iterated as pairs."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = list(pairs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pairs)


def test_containers_of_other_kinds_are_gathered_by_their_entries() -> None:
    caches = [Cache([(torch.ones(2, 3), torch.zeros(2, 3))]), Cache([(torch.ones(1, 3), torch.zeros(1, 3))])]
    joined = gather(caches, "cpu")
    assert isinstance(joined, Cache)
    assert [tuple(leaf.shape) for leaf in joined.pairs[0]] == [(3, 3), (3, 3)]


@dataclass
class Made:
    """What a model returns."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    heads: int
    name: str


def test_dataclasses_and_equal_numbers_and_strings_are_gathered() -> None:
    made = [Made(torch.ones(rows, 3), (torch.zeros(rows, 2),), 4, "text") for rows in (2, 1)]
    joined = gather(made, "cpu")
    assert type(joined) is Made
    assert (joined.logits.shape, joined.hidden[0].shape) == ((3, 3), (3, 2))
    assert (joined.heads, joined.name) == (4, "text")
    with pytest.raises(
        TypeError, match="cannot join 4, 5 of type int: .* only where all replicas return the same"
    ):
        gather([4, 5], "cpu")


def test_sparse_and_dense_gradients_are_added() -> None:
    for first, second in ((torch.eye(3).to_sparse(), torch.eye(3)), (torch.eye(3), torch.eye(3).to_sparse())):
        (total,) = reduce_add_coalesced([[first], [second]], torch.get_default_device())
        assert torch.equal(total, 2 * torch.eye(3))


# States and optimizers


def test_a_state_of_a_compiled_submodule_is_loaded(make_executor: MakeExecutor) -> None:
    model = nn.ModuleDict({"inner": mlp(), "outer": nn.Linear(2, 2).double()})
    model["inner"] = torch.compile(model["inner"], backend="eager")  # type: ignore[assignment]
    executor = make_executor(model, 1)
    state = executor.state_dict()
    assert "inner.0.weight" in state["model"]
    expected = {key: value + 1 for key, value in state["model"].items()}
    executor.load_state_dict({"model": expected})
    assert torch.equal(executor.state_dict()["model"]["inner.0.weight"], expected["inner.0.weight"])


def test_a_model_with_a_compiled_submodule_is_called_as_it_is(make_executor: MakeExecutor) -> None:
    def made() -> nn.Module:
        model = mlp()
        model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
        return model

    alone, executor = made(), make_executor(made(), 3)
    for called in (alone, executor):
        square(called(data()), None).backward()  # type: ignore[operator]
    for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_adagrad_is_saved_and_loaded(make_executor: MakeExecutor, place: torch.device) -> None:
    torch.set_default_device(
        None
    )  # on which it would make its counts of steps, also those of the second device

    def adagrad(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=0.1)

    alone = mlp().to(place)
    optimizer = adagrad(alone.parameters())
    executor = make_executor(mlp().to(place), [place] * 3, optimizer=adagrad)
    for _ in range(3):
        optimizer.zero_grad()
        square(alone(data().to(place)), None).backward()
        optimizer.step()
        executor.step(data(), square)
        executor.load_state_dict(executor.state_dict())
    assert_close(executor, alone)


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


def test_an_interrupt_between_the_step_and_dropping_its_gradients_applies_them_once(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = mlp()
    optimizer = sgd(alone.parameters())
    executor = make_executor(mlp(), 2, optimizer=sgd)
    for number in range(3):
        optimizer.zero_grad()
        square(alone(data()), None).backward()
        optimizer.step()
        with monkeypatch.context() as patched:
            if number == 1:

                def interrupted(parameters: Any) -> None:
                    patched.undo()
                    raise KeyboardInterrupt

                patched.setattr(build, "zero_grads", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    executor.step(data(), square)
            else:
                executor.step(data(), square)
    assert_close(executor, alone)


def test_a_failing_constructor_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())

    def broken(*_: Any) -> Any:
        raise RuntimeError("no stream")

    monkeypatch.setattr(executor.Calls, "__init__", broken)
    with pytest.raises(RuntimeError, match="no stream"):
        ReplicaExecutor(mlp(), places(2), optimizer=sgd)
    assert set(threading.enumerate()) <= before


def test_a_failure_after_unscaling_leaves_the_scaler_usable(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(mlp(torch.float32), 2, optimizer=sgd)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)
    x = data(dtype=torch.float32)
    with monkeypatch.context() as patched:

        def broken(limit: float) -> Any:
            raise RuntimeError("norm")

        assert executor._optimizers is not None
        patched.setattr(executor._optimizers, "clip", broken)
        with pytest.raises(RuntimeError, match="norm"):
            executor.step(x, square, clip_norm=1.0, scaler=scaler)
    executor.step(x, square, clip_norm=1.0, scaler=scaler)
    assert_replicas_equal(executor)


# Copies, waits and devices


@on_the_accelerator
def test_a_bucket_waits_once_per_replica_whatever_its_parameters(
    monkeypatch: pytest.MonkeyPatch, place: torch.device
) -> None:
    """161 parameters on 8 slots: as many waits as for one."""
    made: list[Any] = []
    wait = AcceleratorEvent.wait
    monkeypatch.setattr(AcceleratorEvent, "wait", lambda *given: made.append(given) or wait(*given))
    slots, waits = slots_on([place] * 8), {}
    for count in (1, 161):
        with backend_for(place) as backend:
            compute = [backend.stream(slot, f"compute-{slot.index}") for slot in slots]
            reduce_streams = ReduceStreams(slots, {place: backend})

            given = [[torch.zeros(2, dtype=torch.float64)] * count] * 8
            live = reduce_streams.make(0, plan_buckets(given[0], range(count), 8)[0], given)
            backend.finish()  # the streams of this test have not waited for the zeros
            made.clear()
            for replica, stream in enumerate(compute):
                with backend.use(stream):
                    for index in range(count):
                        reduce_streams.put(live, replica, index, torch.ones(2, dtype=torch.float64))
                    reduce_streams.arrived(live, replica)
            reduce_streams.launch(live, list(range(8)))
            waits[count] = len(made)
            reduce_streams.await_filled(live)
            assert all(torch.equal(view, torch.full_like(view, 8.0)) for view in live.views[7].values())
    assert waits[161] == waits[1] < 200


@on_the_cpu
def test_a_part_made_on_another_gpu_is_copied_by_the_caller() -> None:
    elsewhere = {"x": [torch.empty(2, device="meta")], "w": Whole(torch.empty(2, device="meta"))}
    cuda = torch.device("cuda", 1)
    assert from_another_gpu(elsewhere, cuda)
    assert from_another_gpu({"w": elsewhere["w"]}, cuda)
    assert not from_another_gpu({"x": torch.empty(2)}, cuda)


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


def test_a_module_that_has_stored_attention_maps_is_built_with_copies_of_them() -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.maps: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x)
            self.maps.append(out)
            return out

    model = Storing()
    model(data())
    with ReplicaExecutor(model, places(2), optimizer=sgd) as executor:
        other: Any = executor._replicas.modules[1]
        assert torch.equal(other.maps[0], model.maps[0])
        assert not other.maps[0].requires_grad


def test_the_minus_one_of_data_parallel_is_refused_with_the_name_of_the_cpu() -> None:
    with pytest.raises(DeviceError, match="device -1: devices count from 0; the CPU is 'cpu'"):
        gather([torch.ones(2), torch.ones(2)], -1)
    with pytest.raises(DeviceError, match="device -1: devices count from 0; the CPU is 'cpu'"):
        ReplicaExecutor(nn.Linear(2, 2), places(2), output_device=-1)
