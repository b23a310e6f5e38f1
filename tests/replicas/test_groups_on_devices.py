"""A process group on an accelerator. The other rank is a twin, which has whatever this one has: the mean over both is
this rank's own, so training equals training alone. That sums over ranks are right is in test_process_groups.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from pipegraph.device.accelerator import AcceleratorBackend
from pipegraph.device.backend import Stream, slots_on
from pipegraph.device.opening import backend_for
from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor
from pipegraph.replicas.buckets import plan_buckets
from pipegraph.replicas.reducer import Reducer

from .conftest import MakeExecutor, assert_close, assert_replicas_equal
from .test_accelerator_replicas import adamw, batch, mean_loss, model, on_x, sgd, there

pytestmark = pytest.mark.accelerator


class Twins(dist.ProcessGroup):
    """Two ranks that have the same. Collectives come on the current stream, as NCCL's do."""

    serves: frozenset[str] = frozenset()

    def getBackendName(self) -> str:
        return "twins"

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self.serves:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        for tensor in tensors if options.reduceOp == dist.ReduceOp.SUM else ():
            tensor.mul_(2)
        return self._done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        return self._done(tensors)

    def _done(self, tensors: list[torch.Tensor]) -> Any:
        future: Future[Any] = Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)


@pytest.fixture
def twins(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(Twins, "serves", {"cpu", accelerator.type})
    if "twins" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "twins",
            lambda store, rank, size, timeout: Twins(rank, size),
            devices=["cpu", accelerator.type],
        )
    dist.init_process_group("twins", rank=0, world_size=2, store=dist.HashStore())
    yield accelerator
    dist.destroy_process_group()


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_buckets, "__defaults__", (64, 4096))


def places(device: torch.device) -> list[str]:
    """Two slots of the first device, and one of the second where there is one."""
    return [f"{device.type}:{index}" for index in (0, 0, min(1, torch.accelerator.device_count() - 1))]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(("optimizer", "shard"), [(sgd, False), (adamw, True)])
def test_replicas_of_a_rank_are_summed_and_then_the_ranks(
    make_executor: MakeExecutor, twins: torch.device, optimizer: Any, shard: bool
) -> None:
    alone = model()
    theirs = optimizer(alone.parameters())
    executor = make_executor(model(), places(twins), optimizer=optimizer, shard_optimizer=shard)
    for step in (0, 1, 2, 3):
        theirs.zero_grad()
        mean_loss(on_x(alone, there(batch(step))), there(batch(step))).backward()
        theirs.step()
        executor.step(batch(step), mean_loss, on_x)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


class Net(nn.Module):
    """A layer that is never used, batch norm, and weights with a complex one among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(8, 2)
        self.register_buffer("phase", torch.ones(2, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.norm(self.first(x)))
        return made


def square(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.square().mean()


@pytest.mark.usefixtures("small_buckets")
def test_ranks_agree_which_gradients_there_are(make_executor: MakeExecutor, twins: torch.device) -> None:
    executor = make_executor(Net().to(twins), [twins, twins], optimizer=sgd)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    before = executor.module.never.weight.clone()
    losses = [executor.step(x, square).loss.item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert torch.equal(executor.module.never.weight, before)


def test_sparse_gradients_are_refused_on_a_device(make_executor: MakeExecutor, twins: torch.device) -> None:
    table = nn.Embedding(10, 4, sparse=True).to(twins)
    executor = make_executor(table, [twins, twins], optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(
        ReplicaError, match="summed over ranks by gloo on the CPU only: use a dense embedding"
    ):
        executor.step(torch.arange(8), square)


def test_what_a_group_cannot_do_is_refused_by_name(
    twins: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SyncBatchNorm(nn.BatchNorm1d):
        pass

    with pytest.raises(ReplicaError, match=r"module '1' \(SyncBatchNorm\) makes collectives itself"):
        ReplicaExecutor(nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2)).to(twins), [twins] * 2)
    monkeypatch.setattr(Twins, "serves", {"cpu"})
    with pytest.raises(ReplicaError, match=f"the process group has no backend for {twins.type!r}"):
        ReplicaExecutor(nn.Linear(2, 2).to(twins), [twins])


@pytest.mark.usefixtures("small_buckets")
def test_a_step_that_fails_after_a_collective_closes_the_executor(
    make_executor: MakeExecutor, twins: torch.device
) -> None:
    # One replica: the engine has one thread for a device, which could wait here before another replica's turn.
    executor = make_executor(model(), [f"{twins.type}:0"], optimizer=sgd)
    executor.step(batch(0), mean_loss, on_x)
    reducer = executor._reducer
    assert reducer is not None
    launched = threading.Event()
    reducer.streams.observer = lambda bucket, work: (work(), launched.set())[0]

    def fail(*_: Any) -> None:
        launched.wait()
        raise ValueError("mine")

    executor._replicas.parameters[0][0].register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="mine") as caught:
        executor.step(batch(1), mean_loss, on_x)
    assert any("the other ranks wait" in note for note in caught.value.__notes__)
    with pytest.raises(ReplicaError, match="closed: a step failed after its first collective"):
        executor.step(batch(2), mean_loss, on_x)


class Held:
    """Ranks whose first collective is held up: the other rank has not come."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()

    def mean(self, tensor: torch.Tensor) -> None:
        self.begun.set()
        self.let.wait()


def test_a_step_that_fails_during_the_first_collective_neither_waits_nor_goes_on() -> None:
    parameters = [[nn.Parameter(torch.zeros(3))] for _ in range(2)]
    ranks: Any = Held()
    with backend_for("cpu") as backend:
        reducer = Reducer(parameters, ["a"], slots_on(["cpu"] * 2), {backend.device: backend}, ranks=ranks)
        reducer.begin([0, 1])
        for given in parameters:
            given[0].sum().backward()
        assert ranks.begun.wait(60)
        assert not reducer.abort()
        ranks.let.set()
        reducer.stop()
        reducer.join()


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(("optimizer", "shard"), [(sgd, False), (adamw, True)])
def test_a_vendors_own_sum_is_used_over_distinct_devices(
    make_executor: MakeExecutor,
    accelerator: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: Any,
    shard: bool,
) -> None:
    if torch.accelerator.device_count() < 3:
        pytest.skip("needs three devices")
    roots: list[int | None] = []

    def sum_together(
        self: Any, buffers: list[torch.Tensor], streams: list[Stream], root: int | None = None
    ) -> None:
        """As NCCL does it: each device on its own stream, which waits for the others'."""
        roots.append(root)
        backends = [backend_for(buffer.device) for buffer in buffers]
        total: list[torch.Tensor] = []

        def add() -> None:
            total.append(sum(buffer.to(buffers[0].device) for buffer in buffers))  # type: ignore[arg-type]

        def nested(work: Callable[[], None], left: int) -> None:
            if left == 0:
                work()
            else:
                with backends[left - 1].use(streams[left - 1]):
                    nested(work, left - 1)

        def give() -> None:
            for place, buffer in enumerate(buffers):
                if root in (None, place):
                    buffer.copy_(total[0])

        with torch.no_grad():
            nested(add, len(streams))
            nested(give, len(streams))

    monkeypatch.setattr(AcceleratorBackend, "sums_together", True)
    monkeypatch.setattr(AcceleratorBackend, "sum_together", sum_together)
    alone = model()
    theirs = optimizer(alone.parameters())
    executor = make_executor(
        model(),
        [f"{accelerator.type}:{index}" for index in range(3)],
        optimizer=optimizer,
        shard_optimizer=shard,
    )
    for step in (0, 2, 3):
        theirs.zero_grad()
        mean_loss(on_x(alone, there(batch(step))), there(batch(step))).backward()
        theirs.step()
        executor.step(batch(step), mean_loss, on_x)
    assert_close(executor, alone)
    assert set(roots) == ({0, 1, 2} if shard else {None})
