"""Run by test_process_groups.py as each of two ranks: ``group_worker.py RANK STORE RESULTS``."""

from __future__ import annotations

import copy
import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegraph.errors import ReplicaError
from pipegraph.replicas import ReplicaExecutor
from pipegraph.replicas.buckets import plan_buckets

RANK = int(sys.argv[1])
SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


class Net(nn.Module):
    """A branch that only rank 1 uses, one that nobody does, and batch norm."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.rare = nn.Linear(8, 8)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(8, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(self.first(x)))
        if bool((x[:, 0] > 10).any()):
            y = y + self.rare(y)
        out: torch.Tensor = self.last(y)
        return out


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def data(step: int, rank: int) -> torch.Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.double)
    if rank == 1:
        x[:, 0] += 20  # rank 1 uses `rare`
    return x


def square(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return outputs.pow(2).mean()


def same_everywhere(module: nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        theirs = tensor.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, tensor), f"{name} differs between ranks"


def assert_close(module: nn.Module, reference: nn.Module) -> None:
    for (name, mine), its in zip(module.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12, msg=name)


@scenario
def one_device_per_process_equals_ddp() -> None:
    theirs = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(theirs.parameters())
    with ReplicaExecutor(Net(), ["cpu"], optimizer=sgd) as executor:
        for step in range(20):
            optimizer.zero_grad()
            loss = square(theirs(data(step, RANK)), None)
            loss.backward()
            optimizer.step()
            result = executor.step(data(step, RANK), square)
            assert abs(result.loss.item() - loss.item()) < 1e-12
            assert_close(executor.module, theirs.module)
        parameters = nn.ParameterList(executor.module.parameters())
        same_everywhere(parameters)
        assert torch.equal(executor.module.never.weight, Net().never.weight)


@scenario
def replicas_and_ranks_together_equal_one_device() -> None:
    """Two slots in each of two processes: the mean over ranks of means over rows."""
    alone = Net().eval()
    optimizer = sgd(alone.parameters())
    with ReplicaExecutor(Net().eval(), ["cpu"] * 2, optimizer=sgd) as executor:
        for step in range(20):
            optimizer.zero_grad()
            (sum(square(alone(data(step, rank)), None) for rank in (0, 1)) / 2).backward()  # type: ignore[union-attr]
            optimizer.step()
            executor.step(data(step, RANK), square)
        assert_close(executor.module, alone)
        same_everywhere(executor.module)


@scenario
def the_sharded_optimizer_does_too() -> None:
    alone = Net().eval()
    optimizer = sgd(alone.parameters())
    with ReplicaExecutor(Net().eval(), ["cpu"] * 2, optimizer=sgd, shard_optimizer=True) as executor:
        for step in range(10):
            optimizer.zero_grad()
            (sum(square(alone(data(step, rank)), None) for rank in (0, 1)) / 2).backward()  # type: ignore[union-attr]
            optimizer.step()
            executor.step(data(step, RANK), square)
        assert_close(executor.module, alone)


@scenario
def rank_0s_order_of_buckets_holds_for_all() -> None:
    """Gradients arrive in another order on each rank; equal-sized buckets would be mixed silently."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(6)]).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = list(self.layers) if bool((x[:, 0] > 10).any()) else list(reversed(self.layers))
            for layer in order:
                x = torch.tanh(layer(x))
            return x

    before = plan_buckets.__defaults__
    plan_buckets.__defaults__ = (64, 128)
    try:
        alone = Either()
        optimizer = sgd(alone.parameters())
        with ReplicaExecutor(Either(), ["cpu"] * 2, optimizer=sgd) as executor:
            for step in range(8):
                optimizer.zero_grad()
                (sum(square(alone(data(step, rank)), None) for rank in (0, 1)) / 2).backward()  # type: ignore
                optimizer.step()
                executor.step(data(step, RANK), square)
            assert executor._reducer is not None
            assert len(executor._reducer.layout) == 6
            assert_close(executor.module, alone)
    finally:
        plan_buckets.__defaults__ = before


@scenario
def sparse_gradients_are_summed_sparse() -> None:
    """One rank uses the second table, which is found out to be sparse in its first step; the other does not."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.known = nn.Embedding(10, 4, sparse=True, dtype=torch.double)
            self.found_out = nn.Parameter(torch.randn(10, 4, dtype=torch.double))
            self.last = nn.Linear(4, 2, dtype=torch.double)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.known(x)
            if bool((x > 4).any()):
                y = y + nn.functional.embedding(x, self.found_out, sparse=True)
            out: torch.Tensor = self.last(y)
            return out

    def words(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randint(0, 5, (6,), generator=generator) + 5 * rank

    def plain(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    alone = Tables()
    optimizer = plain(alone.parameters())
    with ReplicaExecutor(Tables(), ["cpu"] * 2, optimizer=plain) as executor:
        for step in range(6):
            optimizer.zero_grad()
            (sum(square(alone(words(step, rank)), None) for rank in (0, 1)) / 2).backward()  # type: ignore
            optimizer.step()
            executor.step(words(step, RANK), square)
        assert_close(executor.module, alone)
        assert executor._reducer is not None
        assert [list(b.offsets) for b in executor._reducer.layout] == [[3, 2]]
        same_everywhere(executor.module)


@scenario
def accumulation_makes_no_collective() -> None:
    alone = Net().eval()
    optimizer = sgd(alone.parameters())
    with ReplicaExecutor(Net().eval(), ["cpu"] * 2, optimizer=sgd) as executor:
        for step in range(6):
            total = sum(square(alone(data(step, rank)), None) for rank in (0, 1)) / 2
            total.backward()  # type: ignore[union-attr]
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                executor.step(data(step, RANK), square)
            else:
                with executor.no_sync():
                    executor.step(data(step, RANK), square)
        assert_close(executor.module, alone)


@scenario
def the_users_own_backward_equals_ddp() -> None:
    theirs = DistributedDataParallel(Net(), find_unused_parameters=True)
    with ReplicaExecutor(Net(), ["cpu"]) as executor:
        for step in range(3):
            for model in (theirs, executor):
                square(model(data(step, RANK)), None).backward()  # type: ignore[operator]
            for (name, mine), its in zip(
                executor.module.named_parameters(), theirs.module.parameters(), strict=True
            ):
                if its.grad is None or not name.startswith("never"):
                    torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12, msg=name)
            executor.zero_grad()
            theirs.zero_grad()


@scenario
def everything_starts_as_on_rank_0() -> None:
    with ReplicaExecutor(Net(seed=RANK), ["cpu"] * 2) as executor:
        same_everywhere(executor.module)
        assert torch.equal(executor.module.first.weight, Net(seed=0).first.weight)


@scenario
def batch_norm_statistics_are_rank_0s() -> None:
    with ReplicaExecutor(Net(), ["cpu"] * 2, optimizer=sgd) as executor:
        for step in range(3):
            executor.step(data(step, RANK), square)
        executor._align()
        same_everywhere(executor.module)


@scenario
def modules_with_collectives_of_their_own_are_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    with pytest.raises(ReplicaError, match=r"'norm' \(SyncBatchNorm\) makes collectives itself"):
        ReplicaExecutor(model, ["cpu"] * 2)
    ReplicaExecutor(copy.deepcopy(model), ["cpu"]).close()


@scenario
def a_failure_after_the_first_collective_closes_the_executor() -> None:
    """The other ranks would wait for the rest for ever. Here both fail at the same place."""
    before = plan_buckets.__defaults__
    plan_buckets.__defaults__ = (64, 128)
    try:
        executor = ReplicaExecutor(Net().eval(), ["cpu"] * 2, optimizer=sgd)
        executor.step(data(0, RANK), square)
        launched = threading.Event()
        reducer = executor._reducer
        assert reducer is not None

        def observer(bucket: int, work: Callable[[], None]) -> None:
            work()
            launched.set()

        def fail(*_: Any) -> None:
            launched.wait()
            raise ValueError("mine")

        reducer.streams.observer = observer
        executor._replicas.modules[1].first.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(ValueError, match="mine") as caught:
            executor.step(data(1, RANK), square)
        assert any("the other ranks wait" in note for note in caught.value.__notes__)
        with pytest.raises(ReplicaError, match="closed: a step failed after its first collective"):
            executor.step(data(2, RANK), square)
    finally:
        plan_buckets.__defaults__ = before


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    results = {}
    for name, run in SCENARIOS.items():
        try:
            run()
            results[name] = ""
        except Exception:
            # The other rank is out of step now: say so and end.
            results[name] = traceback.format_exc()
            break
    Path(sys.argv[3]).write_text(json.dumps(results))
    if all(not failure for failure in results.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
