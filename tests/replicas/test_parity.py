"""Training on replicas equals training on one device with the whole batch, in float64 to 1e-12."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipegraph.replicas.runner import replica_seed

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

pytestmark = pytest.mark.usefixtures("place")

Batch = dict[str, torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3),
}
SGD = OPTIMIZERS["sgd"]


class Net(nn.Module):
    """Tied weights, a branch that is never used, batch norm (in eval), channels."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.inner = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.norm.running_mean = torch.rand(12)
        self.middle = nn.Linear(12, 12)
        self.middle_again = self.middle
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(12, 4)
        self.double()
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.norm(self.inner(x)))
        y = self.dropout(torch.tanh(self.middle(y)))
        return self.out(torch.tanh(self.middle_again(y)))


def batches(steps: int, rows: tuple[int, ...] = (12, 9, 1, 13, 2, 7)) -> Iterator[Batch]:
    """Uneven and tiny ones included."""
    generator, here = torch.Generator().manual_seed(5), torch.get_default_device()
    for step in range(steps):
        count = rows[step % len(rows)]
        yield {
            "x": torch.randn(count, 6, generator=generator, dtype=torch.double, device="cpu").to(here),
            "y": torch.randint(0, 4, (count,), generator=generator, device="cpu").to(here),
        }


def on_x(module: Any, part: Batch) -> torch.Tensor:
    out: torch.Tensor = module(part["x"])
    return out


def mean_loss(outputs: torch.Tensor, part: Batch) -> torch.Tensor:
    return cross_entropy(outputs, part["y"])


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_steps_equal_one_device(make_executor: MakeExecutor, slots: int, name: str) -> None:
    alone = Net()
    optimizer = OPTIMIZERS[name](alone.parameters())
    executor = make_executor(Net(), slots, optimizer=OPTIMIZERS[name])
    for batch in batches(12):  # each size twice
        optimizer.zero_grad()
        loss = mean_loss(on_x(alone, batch), batch)
        loss.backward()
        optimizer.step()
        result = executor.step(batch, mean_loss, on_x)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_class_weights_and_ignored_rows_through_a_pair(make_executor: MakeExecutor, slots: int) -> None:
    weights = torch.tensor([0.1, 5.0, 1.0, 2.0], dtype=torch.double)

    def pair(outputs: torch.Tensor, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        total = cross_entropy(outputs, part["y"], weights.to(outputs.device), ignore_index=3, reduction="sum")
        kept = part["y"][part["y"] != 3]
        return total, weights.to(kept.device)[kept].sum()

    alone = Net()
    optimizer = SGD(alone.parameters())
    executor = make_executor(Net(), slots, optimizer=SGD)
    for step, batch in enumerate(batches(30, rows=(12, 9, 13, 7))):
        if step % 3 == 0:
            batch["y"][: len(batch["y"]) // 2] = 3  # the first parts have nothing but ignored rows
        optimizer.zero_grad()
        loss = cross_entropy(on_x(alone, batch), batch["y"], weights, ignore_index=3)
        loss.backward()
        optimizer.step()
        result = executor.step(batch, pair, on_x)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


def test_sums_add_up(make_executor: MakeExecutor) -> None:
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.001)
    executor = make_executor(Net(), 3, optimizer=lambda params: torch.optim.SGD(params, lr=0.001))
    for batch in batches(10):
        optimizer.zero_grad()
        loss = cross_entropy(on_x(alone, batch), batch["y"], reduction="sum")
        loss.backward()
        optimizer.step()
        result = executor.step(
            batch, lambda out, part: cross_entropy(out, part["y"], reduction="sum"), on_x, reduction="sum"
        )
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert_close(executor, alone)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_accumulation_equals_accumulation_on_one_device(make_executor: MakeExecutor, slots: int) -> None:
    """Three batches to a step, the last of them so small that some replicas have no rows when it is reduced."""
    alone = Net()
    optimizer = SGD(alone.parameters())
    executor = make_executor(Net(), slots, optimizer=SGD)

    def third(outputs: torch.Tensor, part: Batch) -> torch.Tensor:
        return mean_loss(outputs, part) / 3

    for number, batch in enumerate(batches(30, rows=(12, 9, 1))):
        third(on_x(alone, batch), batch).backward()
        if number % 3 < 2:
            with executor.no_sync():
                executor.step(batch, third, on_x)
        else:
            optimizer.step()
            optimizer.zero_grad()
            executor.step(batch, third, on_x)
            assert_replicas_equal(executor)
    assert_close(executor, alone)


def test_clipping_uses_the_norm_of_the_whole_gradient(make_executor: MakeExecutor) -> None:
    alone = Net()
    optimizer = SGD(alone.parameters())
    executor = make_executor(Net(), 3, optimizer=SGD)
    for batch in batches(20):
        optimizer.zero_grad()
        mean_loss(on_x(alone, batch), batch).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.2)
        optimizer.step()
        result = executor.step(batch, mean_loss, on_x, clip_norm=0.2)
        assert result.grad_norm is not None
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


@pytest.mark.parametrize("slots", [1, 3])
def test_dropout_in_deterministic_mode_equals_a_serial_loop(make_executor: MakeExecutor, slots: int) -> None:
    torch.manual_seed(21)
    alone = Net(dropout=0.4)
    optimizer = SGD(alone.parameters())
    executor = make_executor(Net(dropout=0.4), slots, optimizer=SGD, deterministic=True)
    seed = torch.initial_seed()
    before = torch.get_rng_state()
    for step, batch in enumerate(batches(20)):
        optimizer.zero_grad()
        size = -(-len(batch["x"]) // slots)
        parts = [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, len(batch["x"]), size)]
        for replica, part in enumerate(parts):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(replica_seed(seed, step, replica))
                loss = mean_loss(on_x(alone, part), part) * len(part["x"]) / len(batch["x"])
            loss.backward()
        optimizer.step()
        executor.step(batch, mean_loss, on_x)
        assert_replicas_equal(executor)
    assert torch.equal(before, torch.get_rng_state())
    assert_close(executor, alone)
