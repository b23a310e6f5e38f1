"""Buckets, their order, hooks that never wait, and every wait of the side streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chaos import Chaos
from hypothesis import given, strategies as st
from torch import nn

from pipegraph.device import CpuBackend, backend_for, slots_on
from pipegraph.replicas import replica_streams
from pipegraph.replicas.buckets import ParameterFacts, deal_owners, plan_buckets
from pipegraph.replicas.reduce_streams import LiveBucket, ReduceStreams
from pipegraph.replicas.reducer import Reducer

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

CPU = torch.device("cpu")

# The plan


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2))
    ),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_parameter_has_one_aligned_place(sizes: list[Any], random: Any, owned: bool) -> None:
    facts = [ParameterFacts(numel, dtype, owner if owned else None) for numel, dtype, owner in sizes]
    order = list(range(len(facts)))
    random.shuffle(order)
    buckets = plan_buckets(facts, order, 3, first_bytes=64, bucket_bytes=1024)
    placed = [member.parameter for bucket in buckets for member in bucket.members]
    assert sorted(placed) == sorted(order)
    for bucket in buckets:
        end = 0
        for member in bucket.members:
            assert member.offset >= end
            assert member.offset * bucket.dtype.itemsize % 64 == 0
            assert facts[member.parameter].dtype == bucket.dtype
            assert not owned or facts[member.parameter].owner == bucket.owner
            end = member.offset + member.numel
        assert end <= bucket.numel


def test_the_first_bucket_is_small_and_owners_take_turns() -> None:
    facts = [ParameterFacts(1000, torch.float32)] * 10
    buckets = plan_buckets(facts, range(9, -1, -1), 3, first_bytes=4000, bucket_bytes=12000)
    assert [[m.parameter for m in b.members] for b in buckets] == [[9], [8, 7, 6], [5, 4, 3], [2, 1, 0]]
    assert [b.owner for b in buckets] == [0, 1, 2, 0]


def test_owners_shares_are_near_equal() -> None:
    nbytes = [100, 90, 10, 10, 80, 10]
    owners = deal_owners(nbytes, 2)
    shares = [
        sum(n for n, owner in zip(nbytes, owners, strict=True) if owner == replica) for replica in (0, 1)
    ]
    assert shares == [130, 170]  # at most 4/3 of the best (Graham)


# In the executor


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def data(seed: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


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


@pytest.mark.usefixtures("small_buckets")
def test_buckets_are_launched_in_order_and_rebuilt_once(make_executor: MakeExecutor, mode: str) -> None:
    executor = make_executor(model(), 3, mode, optimizer=sgd)
    reducer = executor._reducer
    assert reducer is not None
    launched: list[int] = []
    launch = reducer.streams.launch

    def watched(live: Any, contributors: Any) -> None:
        launched.append(live.number)
        launch(live, contributors)

    reducer.streams.launch = watched  # type: ignore[method-assign]
    layouts = []
    for step in range(4):
        launched.clear()
        executor.step(data(step), square)
        assert launched == list(range(len(reducer.layout)))
        layouts.append(reducer.layout)
    assert len(layouts[0]) > 2
    assert layouts[1] == layouts[2] == layouts[3]
    # The last layer's gradients come first.
    assert {member.parameter for member in layouts[1][0].members} <= {4, 5}
    assert_close(executor, trained_alone(4, lambda step: 6))


@pytest.mark.usefixtures("small_buckets")
def test_buckets_are_reduced_while_backward_runs(make_executor: MakeExecutor, mode: str) -> None:
    """The last layer's bucket is summed while the first layer's backward is still held up."""
    executor = make_executor(model(), 2, mode, optimizer=sgd)
    executor.step(data(0), square)
    reducer = executor._reducer
    assert reducer is not None
    summed = threading.Event()
    seen: list[bool] = []

    def observer(bucket: int, work: Callable[[], None]) -> None:
        work()
        if bucket == 0:
            summed.set()

    def hold(*_: Any) -> None:
        summed.wait()  # not a hook of ours: a long backward of the first layers
        seen.append(True)

    reducer.streams.observer = observer
    # In the joint mode the one thread runs both replicas' last layers before their first ones.
    for module in executor._replicas.modules:
        module[0].register_full_backward_hook(hold)  # type: ignore[index]
    x = data(1).requires_grad_()
    executor.step(x, square)
    assert seen == [True, True]


def test_a_hook_that_waits_is_caught_by_the_one_engine_thread(make_executor: MakeExecutor, mode: str) -> None:
    """Broken on purpose: a hook waits until the other replica has the same gradient.

    With a thread per replica nothing is seen. With one engine thread, as a GPU
    has, the only thread that could bring the other gradient is the one that waits: seen without any clock, because the
    waiting hook finds itself in the thread of the whole backward.
    """
    executor = make_executor(model(), 2, mode, optimizer=sgd)
    executor.step(data(0), square)
    reducer = executor._reducer
    assert reducer is not None
    arrive = reducer._arrive
    condition = threading.Condition()
    arrived: set[tuple[int, int]] = set()
    threads: dict[int, int] = {}
    deadlocks: list[int] = []

    def waiting(replica: int, index: int, parameter: torch.Tensor) -> None:
        arrive(replica, index, parameter)
        with condition:
            threads[replica] = threading.get_ident()
            arrived.add((replica, index))
            condition.notify_all()
            if threading.get_ident() == backward_thread:
                if (1 - replica, index) not in arrived:
                    deadlocks.append(index)  # waiting here would wait for ourselves
                return
            condition.wait_for(lambda: (1 - replica, index) in arrived)

    backward_thread = threading.get_ident() if mode == "joint" else -1
    reducer._arrive = waiting  # type: ignore[method-assign]
    executor.step(data(1), square)
    assert bool(deadlocks) == (mode == "joint")
    assert len(set(threads.values())) == (1 if mode == "joint" else 2)


def test_our_hooks_do_not_wait_for_held_side_streams(make_executor: MakeExecutor, mode: str) -> None:
    """All hooks of a step return although no side stream does anything until backward has ended."""
    executor = make_executor(model(), 3, mode, optimizer=sgd)
    reducer = executor._reducer
    assert reducer is not None
    executor.step(data(0), square)
    gate = threading.Event()

    def observer(bucket: int, work: Callable[[], None]) -> None:
        gate.wait()
        work()

    reducer.streams.observer = observer
    complete = reducer.complete

    def opened() -> None:
        gate.set()  # backward has returned in all replicas
        complete()

    reducer.complete = opened  # type: ignore[method-assign]
    executor.step(data(1), square)
    assert_close(executor, trained_alone(2, lambda step: 6))


# Every wait


def chaotic(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(replica_streams, "backend_for", lambda device: CpuBackend(Chaos(seed)))


def uneven(step: int) -> int:
    return (6, 1, 7, 2)[step % 4]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("steps", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_late_streams_and_poisoned_buffers_leave_every_step_right(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch, mode: str, shard: bool, steps: int
) -> None:
    chaotic(monkeypatch, seed=steps)
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    executor = make_executor(
        model(), 3, mode, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), shard_optimizer=shard
    )
    for step in range(steps):
        optimizer.zero_grad()
        loss = square(alone(data(step, uneven(step))), None)
        loss.backward()
        optimizer.step()
        assert executor.step(data(step, uneven(step)), square).loss.item() == pytest.approx(
            loss.item(), rel=1e-11
        )
        if step % 50 == 0:
            assert_replicas_equal(executor)
    assert_close(executor, alone)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("wait", ["await_filled", "_await_summed"])
def test_one_wait_removed_from_training_is_found(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch, mode: str, wait: str
) -> None:
    chaotic(monkeypatch, seed=1)
    monkeypatch.setattr(ReduceStreams, wait, lambda *_: None)
    executor = make_executor(model(), 3, mode, optimizer=sgd)
    alone = trained_alone(20, uneven)
    for step in range(20):
        executor.step(data(step, uneven(step)), square)
    with pytest.raises(AssertionError):
        assert_close(executor, alone)


def test_the_wait_for_other_owners_parameters_removed_is_found(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from pipegraph.replicas.parameter_gather import Exchange

    chaotic(monkeypatch, seed=1)
    monkeypatch.setattr(Exchange, "wait", lambda *_: None)
    executor = make_executor(model(), 3, mode, optimizer=sgd, shard_optimizer=True)
    alone = trained_alone(20, uneven)

    def train() -> None:
        for step in range(20):
            executor.step(data(step, uneven(step)), square)
        assert_close(executor, alone)

    # A copy that comes late enough changes a parameter under a graph that uses it, which autograd notices.
    with pytest.raises((AssertionError, RuntimeError), match=r"differs by|inplace operation"):
        train()


def one_bucket(reduce_streams: ReduceStreams) -> LiveBucket:
    facts = [ParameterFacts(8, torch.float64)]
    return reduce_streams.make(0, plan_buckets(facts, [0], 3)[0], [[torch.zeros(8, dtype=torch.float64)]] * 3)


def filled(value: float) -> torch.Tensor:
    return torch.full((8,), value, dtype=torch.float64)


@pytest.mark.parametrize("removed", [None, "_await_arrivals", "_await_summed", "await_filled"])
def test_each_wait_of_the_lanes_is_needed(monkeypatch: pytest.MonkeyPatch, removed: str | None) -> None:
    """As on a GPU: gradients are written and read on streams of the replicas' own, and the host never waits."""
    if removed is not None:
        monkeypatch.setattr(ReduceStreams, removed, lambda *_: None)
    slots = slots_on(["cpu"] * 3)
    read: list[tuple[int, torch.Tensor]] = []
    for seed in range(20):
        with CpuBackend(Chaos(seed)) as backend:
            compute = [backend.stream(slot, f"compute-{slot.index}") for slot in slots]
            reduce_streams = ReduceStreams(slots, {CPU: backend}, scattered_sums=False, ranks=None)
            live = one_bucket(reduce_streams)
            for step in range(20):
                for replica, stream in enumerate(compute):
                    with backend.use(stream):
                        reduce_streams.put(live, replica, 0, filled(step + replica))
                        reduce_streams.arrived(live, replica)
                reduce_streams.launch(live, [0, 1, 2])
                for replica, stream in enumerate(compute):
                    with backend.use(stream):
                        reduce_streams.await_filled(live)
                    view = live.views[replica][0]
                    stream.run(lambda view=view, step=step: read.append((3 * step + 3, view.clone())))
            for stream in compute:
                stream.synchronize()
    wrong = sum(not torch.equal(value, filled(total)) for total, value in read)
    assert (wrong == 0) == (removed is None)


@pytest.mark.parametrize("removed", [False, True])
def test_the_wait_for_the_last_readers_is_needed(monkeypatch: pytest.MonkeyPatch, removed: bool) -> None:
    """A replica continues to its next gradient while another has not yet copied the last sum."""
    if removed:
        monkeypatch.setattr(ReduceStreams, "_await_readers", lambda *_: None)
    slots = slots_on(["cpu"] * 3)
    gate = threading.Event()
    with backend_for("cpu") as backend:
        ahead = backend.stream(slots[0], "ahead")
        reduce_streams = ReduceStreams(slots, {CPU: backend}, scattered_sums=False, ranks=None)
        live = one_bucket(reduce_streams)
        for replica in range(3):
            reduce_streams.put(live, replica, 0, filled(1))
            reduce_streams.arrived(live, replica)
        reduce_streams._side[2].run(gate.wait)  # the last replica is late
        reduce_streams.launch(live, [0, 1, 2])
        with backend.use(ahead):
            live.summed.wait()
            reduce_streams.put(live, 0, 0, filled(50))
            reduce_streams.arrived(live, 0)
        if removed:
            ahead.synchronize()
        gate.set()
        live.filled[2].synchronize()
        assert torch.equal(live.views[2][0], filled(3)) == (not removed)


@pytest.mark.parametrize("removed", [False, True])
def test_the_wait_for_an_idle_replicas_optimizer_is_needed(
    monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """A replica without rows brings no gradient that would come after its last step; its bucket is written all the same."""
    if removed:
        monkeypatch.setattr(ReduceStreams, "_await_users", lambda *_: None)
    slots = slots_on(["cpu"] * 3)
    gate = threading.Event()
    read: list[torch.Tensor] = []
    with backend_for("cpu") as backend:
        optimizer = backend.stream(slots[2], "optimizer")
        reduce_streams = ReduceStreams(slots, {CPU: backend}, scattered_sums=False, ranks=None)
        live = one_bucket(reduce_streams)
        for replica in range(3):
            reduce_streams.put(live, replica, 0, filled(1))
            reduce_streams.arrived(live, replica)
        reduce_streams.launch(live, [0, 1, 2])
        reduce_streams.await_filled(live)
        optimizer.run(gate.wait)  # the idle replica's step is late
        optimizer.run(lambda: read.append(live.views[2][0].clone()))
        with backend.use(optimizer):
            reduce_streams.used(2)
        for replica in range(2):
            reduce_streams.put(live, replica, 0, filled(7))
            reduce_streams.arrived(live, replica)
        reduce_streams.launch(live, [0, 1])
        if removed:
            live.filled[2].synchronize()
        gate.set()
        optimizer.synchronize()
        live.filled[2].synchronize()
        assert torch.equal(read[0], filled(3)) == (not removed)
        assert torch.equal(live.views[2][0], filled(14))


def test_a_reducer_alone_sums_in_the_replicas_order() -> None:
    """((a + b) + c), to the last bit, whoever owns the bucket."""
    values = [1e16, 1.0, -1e16]
    parameters = [[nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(4)] for _ in values]
    with backend_for("cpu") as backend:
        reducer = Reducer(parameters, list("abcd"), slots_on(["cpu"] * 3), {CPU: backend})
        reducer.begin([0, 1, 2])
        for given, value in zip(parameters, values, strict=True):
            sum((p * value).sum() for p in given).backward()  # type: ignore[union-attr]
        reducer.complete()
        reducer.give()
        for given in parameters:
            for parameter in given:
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [(1e16 + 1.0) - 1e16] * 3
        reducer.stop()
        reducer.join()
