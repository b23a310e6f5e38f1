"""Failures keep their type, say where, hang nothing, and leave the executor usable or clearly closed."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from accelerators import drawn, on_the_accelerator, places
from torch import nn

from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor, replica_threads

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

pytestmark = pytest.mark.usefixtures("place")


class BrokenError(Exception):
    """Of the user's own."""


class Net(nn.Module):
    """Its first input column says on which rows to fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] == 99).any()):
            raise BrokenError("forward")
        out: torch.Tensor = self.net(x)
        return out


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def data(seed: int = 0, bad: int | None = None) -> torch.Tensor:
    x = drawn(9, 4, seed=seed)
    if bad is not None:
        x[bad * 3, 0] = 99
    return x


def square(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


def assert_usable(executor: ReplicaExecutor, steps: int) -> None:
    """As good as one that never failed: the same numbers as one device that skipped the failing batches."""
    alone = Net()
    optimizer = sgd(alone.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        square(alone(data(step)), None).backward()
        optimizer.step()
    assert_replicas_equal(executor)
    assert_close(executor, alone)


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_failing_forward(make_executor: MakeExecutor, replica: int) -> None:
    executor = make_executor(Net(), 3, optimizer=sgd)
    for step in range(6):
        with pytest.raises(BrokenError, match="forward") as caught:
            executor.step(data(bad=replica), square)
        assert caught.value.__notes__ == [f"in replica {replica} on {executor._runner.slots[replica]}"]
        assert "forward" in [entry.name for entry in caught.traceback]
        executor.step(data(step), square)
    assert_usable(executor, 6)


def test_the_lowest_failing_replica_speaks(make_executor: MakeExecutor) -> None:
    executor = make_executor(Net(), 3, optimizer=sgd)
    x = data(bad=2)
    x[3, 0] = 99
    with pytest.raises(BrokenError) as caught:
        executor(x)
    assert caught.value.__notes__ == [f"in replica 1 on {executor._runner.slots[1]}"]


def test_a_failing_loss(make_executor: MakeExecutor) -> None:
    def loss(outputs: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if bool((part == 77).any()):
            raise BrokenError("loss")
        return square(outputs, part)

    executor = make_executor(Net(), 3, optimizer=sgd)
    for step in range(6):
        x = data(step)
        x[8, 0] = 77
        with pytest.raises(BrokenError, match="loss") as caught:
            executor.step(x, loss)
        assert caught.value.__notes__ == [f"in replica 2 on {executor._runner.slots[2]}"]
        executor.step(data(step), loss)
    assert_usable(executor, 6)


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_failing_hook_in_backward(make_executor: MakeExecutor, place: torch.device, where: str) -> None:
    """After the first bucket was reduced, or before."""
    executor = make_executor(Net(), 3, optimizer=sgd)
    replica: Any = executor._replicas.modules[2]
    layer = replica.net[2 if where == "first" else 0]

    def fail(*_: Any) -> None:
        raise BrokenError("hook")

    for step in range(6):
        handle = layer.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(BrokenError, match="hook") as caught:
            executor.step(data(seed=50), square)
        if place.type == "cpu":
            assert caught.value.__notes__ == [f"in replica 2 on {executor._runner.slots[2]}"]
        handle.remove()
        executor.step(data(step), square)
    assert_usable(executor, 6)


def test_a_failure_in_a_later_micro_batch_drops_what_was_accumulated(make_executor: MakeExecutor) -> None:
    executor = make_executor(Net(), 3, optimizer=sgd)
    with executor.no_sync():
        executor.step(data(seed=50), square)
    with pytest.raises(BrokenError):
        executor.step(data(bad=1), square)
    for step in range(3):
        executor.step(data(step), square)
    assert_usable(executor, 3)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c_waits_for_the_replicas_and_leaves_the_executor_usable(
    make_executor: MakeExecutor, where: str
) -> None:
    executor = make_executor(Net(), 3, optimizer=sgd)

    def interrupt(*_: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    module: Any = executor._replicas.modules[1]
    for step in range(4):
        if where == "forward":
            handle = module.net[1].register_forward_hook(interrupt)
        else:
            handle = module.net[0].weight.register_post_accumulate_grad_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.step(data(seed=50), square)
            for _ in range(10_000):  # where the signal arrives late, it does so here
                pass
        handle.remove()
        executor.step(data(step), square)
    assert_usable(executor, 4)


def test_a_second_ctrl_c_closes_the_executor_and_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ReplicaExecutor(Net(), places(2), optimizer=sgd)
    gate = threading.Event()
    module: Any = executor._replicas.modules[1]
    module.net[1].register_forward_hook(lambda *_: gate.wait() and None)

    def interrupted(futures: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replica_threads, "wait", interrupted)  # Ctrl-C in each of the two waits
    with pytest.raises(KeyboardInterrupt, match="twice"):
        executor.step(data(), square)
    with pytest.raises(ReplicaError, match="closed: interrupted twice"):
        executor.step(data(), square)
    gate.set()
    assert executor._runner.threads is not None
    for thread in executor._runner.threads.members:
        thread.join()


def test_a_failing_optimizer_step_closes_the_executor_clearly(make_executor: MakeExecutor) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise BrokenError("optimizer")

    executor = make_executor(Net(), 2, optimizer=lambda params: Failing(params, lr=0.1))
    with pytest.raises(BrokenError, match="optimizer") as caught:
        executor.step(data(), square)
    assert (
        "the executor is closed: its replicas may differ after a failed optimizer step"
        in caught.value.__notes__
    )
    with pytest.raises(ReplicaError, match="closed: an optimizer step failed half-way"):
        executor.step(data(), square)


@pytest.mark.filterwarnings("ignore:Using backward.*create_graph")
def test_create_graph_is_refused_by_name(make_executor: MakeExecutor) -> None:
    executor = make_executor(Net(), 2, optimizer=sgd)

    def own_backward(outputs: torch.Tensor, part: Any) -> torch.Tensor:
        loss = square(outputs, part)
        loss.backward(create_graph=True, retain_graph=True)
        return loss

    with pytest.raises(ReplicaError, match=r"backward\(create_graph=True\) is not supported"):
        executor.step(data(), own_backward)
    executor.step(data(), square)


class Checkpointed(nn.Module):
    """One block used twice under activation checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(4, 4).double()
        self.late = nn.Linear(4, 4).double()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        y = x.requires_grad_()
        for _ in range(2):
            y = checkpoint(lambda z: torch.tanh(self.block(z)), y, use_reentrant=self.reentrant)  # type: ignore
        return self.late(y)  # type: ignore[no-any-return]


@on_the_accelerator
@pytest.mark.usefixtures("missing_wait")  # autograd adds to a bucket that was summed, and is told so
def test_reentrant_checkpoints_of_a_block_used_twice_are_found_out(make_executor: MakeExecutor) -> None:
    executor = make_executor(Checkpointed(True), 2, optimizer=sgd)
    with pytest.raises(ReplicaError, match=r"'block.\w+' got a second gradient .* use_reentrant=False"):
        executor.step(data(), square)


def test_checkpoints_of_a_block_used_twice_work(make_executor: MakeExecutor) -> None:
    alone = Checkpointed(False)
    optimizer = sgd(alone.parameters())
    executor = make_executor(Checkpointed(False), 2, optimizer=sgd)
    for step in range(3):
        optimizer.zero_grad()
        square(alone(data(step)), None).backward()
        optimizer.step()
        executor.step(data(step), square)
    assert_close(executor, alone)


def test_a_failing_side_stream_is_raised_and_leaves_the_executor_usable(make_executor: MakeExecutor) -> None:
    executor = make_executor(Net(), 3, optimizer=sgd)
    reducer = executor._reducer
    assert reducer is not None

    def fail(bucket: int, work: Any) -> None:
        raise BrokenError("side stream")

    for step in range(4):
        reducer.streams.observer = fail
        with pytest.raises(BrokenError, match="side stream"):
            executor.step(data(seed=50), square)
        reducer.streams.observer = None
        executor.step(data(step), square)
    assert_usable(executor, 4)


def test_replicas_serve_where_no_thread_could_be_started_to_restore_the_width(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name == "pipegraph-width":
            raise RuntimeError("can't start new thread")
        start(thread)

    width = torch.get_num_threads()
    monkeypatch.setattr(threading.Thread, "start", starting)
    executor = make_executor(Net(), 3, optimizer=sgd)
    executor.step(data(), square)
    assert torch.get_num_threads() == width
    monkeypatch.undo()
    assert_usable(executor, 1)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("batch", "field"), [({"x": None, "y": None}, "'x'"), ((None, None), "0")])
def test_a_model_that_gets_a_whole_part_for_a_field_names_forward(
    make_executor: MakeExecutor, slots: int, batch: Any, field: str
) -> None:
    executor = make_executor(Net(), slots, optimizer=sgd)
    x = drawn(4, 4)
    filled = dict.fromkeys(batch, x) if isinstance(batch, dict) else (x, x)
    for call in (lambda: executor(filled), lambda: executor.step(filled, lambda out, part: out.sum())):
        with pytest.raises((TypeError, AttributeError, IndexError)) as caught:
            call()
        assert f"forward=lambda module, part: module(part[{field}])" in caught.value.__notes__[0]
    own: Any = lambda module, part: module(part["z"])  # noqa: E731
    with pytest.raises((TypeError, KeyError)) as caught:
        executor.step(filled, lambda out, part: out.sum(), forward=own)
    assert not any("whole part" in note for note in caught.value.__notes__)
