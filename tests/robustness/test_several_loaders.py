"""Several loaders of one graph: at once, in turn, in threads. Nothing that changes is theirs together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import data

import pipegraph as pg
from pipegraph import operators as ops

NUMBERS = list(range(400))


def sampled(sampler: Any, then: Callable[[Any], Any] = abs, workers: int = 2) -> pg.Graph:
    graph = pg.Graph("sampled")
    graph.add(ops.FromSequence(NUMBERS, sampler=sampler), workers=workers).then(then)
    return graph


@pytest.mark.parametrize("cached", [False, True])
def test_two_loaders_of_a_graph_with_a_sampler_deliver_all_of_it_each(cached: bool) -> None:
    graph = pg.Graph("sampled")
    node = graph.add(ops.FromSequence(NUMBERS, sampler=data.RandomSampler(NUMBERS)), capacity=4)
    if cached:
        node = node.then(abs).then(ops.Cache("1 MB"))
    with graph.loader(epochs=2) as one, graph.loader(epochs=2) as other:
        for _ in range(2):
            passing = iter(one)
            first = list(itertools.islice(passing, 10))
            assert sorted(other) == NUMBERS
            assert sorted([*first, *passing]) == NUMBERS


def test_a_cache_in_memory_belongs_to_one_loader() -> None:
    calls: list[int] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(int(x))
        return x + 1

    graph = pg.Graph("cached")
    source = graph.add(ops.FromSequence(torch.arange(4)))
    source.then(noted).then(ops.Cache("1 MB"))
    with graph.loader() as loader:
        for _ in range(2):
            for value in loader:
                value += 100  # against the rules; it must not reach another loader
    assert len(calls) == 4
    with graph.loader() as loader:
        assert [int(value) for value in loader] == [1, 2, 3, 4]


def test_a_state_of_one_loader_continues_in_another_while_the_first_continues_too() -> None:
    graph = sampled(data.DistributedSampler(NUMBERS, 1, 0, seed=3))  # type: ignore[arg-type]
    with graph.loader() as one, graph.loader() as other:
        passing = iter(one)
        head = [next(passing) for _ in range(33)]
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert sorted(head + list(other)) == NUMBERS
        assert sorted(head + list(passing)) == NUMBERS
