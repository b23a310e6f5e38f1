"""Shared by the replica tests: executors that are closed, and comparisons."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerators import places
from torch import nn

from pipegraph.replicas import ReplicaExecutor

MakeExecutor = Callable[..., ReplicaExecutor]


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Tiny tensors gain nothing from several threads per operation, and lose much when the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_executor() -> Iterator[MakeExecutor]:
    """Builds executors and closes them; afterwards no thread of theirs is left."""
    before = set(threading.enumerate())
    made: list[ReplicaExecutor] = []

    def make(model: nn.Module, slots: int | list[Any] = 2, **options: Any) -> ReplicaExecutor:
        executor = ReplicaExecutor(model, places(slots) if isinstance(slots, int) else slots, **options)
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("pipegraph")]


def assert_replicas_equal(executor: ReplicaExecutor) -> None:
    """Parameters and optimizer state, bit by bit."""
    first, *others = executor._replicas.parameters
    for given in others:
        for mine, its in zip(first, given, strict=True):
            assert torch.equal(mine.cpu(), its.cpu())
    if executor._optimizers is None:
        return
    states = [each.state_dict()["state"] for each in executor._optimizers.each]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for index, entries in state.items():
            for name, value in entries.items():
                mine = states[0][index][name]
                assert (
                    torch.equal(torch.as_tensor(mine).cpu(), torch.as_tensor(value).cpu())
                    if value is not None
                    else mine is None
                )


def assert_close(executor: ReplicaExecutor, reference: nn.Module, tolerance: float = 1e-12) -> None:
    """Parameters equal to the reference's, relative to each tensor's size."""
    named = dict(executor.module.named_parameters())
    for name, expected in reference.named_parameters():
        scale = expected.abs().max().clamp(min=1.0)
        error = ((named[name] - expected).abs().max() / scale).item()
        assert error <= tolerance, f"{name} differs by {error}"
