"""Caches below draws and above changes; states that one rank saved for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


def add(x: int, k: int) -> int:
    return x + k


def delivered(graph: pg.Graph, **options: Any) -> list[Any]:
    with graph.loader(**options) as loader:
        return list(loader)


def cached(function: Callable[[Any], Any]) -> pg.Graph:
    graph = pg.Graph("cached", seed=1)
    numbers = graph.add(ops.FromSequence(range(5), order=pg.order.StridedOrder(shuffle=False)))
    numbers.then(function, name="function").then(ops.Cache("1 MB"))
    return graph


ORDERS = [pg.order.StridedOrder(), pg.order.BlockOrder(), pg.order.LaneOrder(lanes=3)]


def elastic(order: pg.order.Order, n: int = 37) -> pg.Graph:
    graph = pg.Graph("elastic", seed=3)
    graph.add(ops.FromSequence(range(n), order=order)).then(abs, workers=2).then(ops.Batch(2, collate=list))
    return graph


@pytest.mark.parametrize("order", ORDERS, ids=["strided", "block", "lane"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_state_that_one_rank_saved_serves_all_ranks(order: pg.order.Order, steps: int) -> None:
    whole = [delivered(elastic(order), rank=rank, world_size=3) for rank in range(3)]
    with elastic(order).loader(rank=0, world_size=3) as loader:
        passing = iter(loader)
        for _ in range(steps):
            next(passing)
        state = json.dumps(loader.state_dict())
    for rank in range(3):
        with elastic(order).loader(rank=rank, world_size=3) as loader:
            loader.load_state_dict(json.loads(state))
            assert list(loader) == whole[rank][steps:]


def test_the_state_of_one_rank_is_refused_for_another_where_ranks_stand_at_different_places() -> None:
    graph = pg.Graph("inelastic", seed=3)
    graph.add(ops.FromSequence(range(9))).then(ops.Filter(bool), name="odd")
    with graph.loader(rank=0, world_size=2, equal_steps=False) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        graph.loader(rank=1, world_size=2, equal_steps=False) as loader,
        pytest.raises(
            pg.errors.StateError, match="no part for rank 1; .*stages 'odd' each rank needs its own"
        ),
    ):
        loader.load_state_dict(state)


class Drawing:
    """A dataset that draws when it is read."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> float:
        return index + float(torch.empty(()).uniform_())


async def draw_in_a_task(x: Any) -> float:
    return float(torch.rand(()))


@pytest.mark.parametrize("backend", ["thread", "inline"])
@pytest.mark.parametrize(
    ("data", "function", "stage"),
    [
        (range(5), lambda x: x + float(torch.randn(())), "function"),
        (range(5), draw_in_a_task, "function"),
        (Drawing(), lambda x: x, "source"),
    ],
)
def test_a_cache_below_a_draw_from_torch_is_refused(
    data: Any, function: Callable[[Any], Any], stage: str, backend: Any
) -> None:
    """It would give an epoch the numbers of another, or not, as the stages happen to be ahead of each other."""
    graph = pg.Graph("cached", seed=1)
    values = graph.add(ops.FromSequence(data), name="source").then(function, name="function", backend=backend)
    values.then(ops.Cache("1 MB"))
    text = f"stage 'cache': a Cache keeps results that depend on their item alone, but .*stage '{stage}' .*draws random "
    text += "numbers from torch's generators.*" + (
        "Draw in a" if stage == "source" else f"Move the Cache above '{stage}'"
    )
    with graph.loader(epochs=2) as loader, pytest.raises(GraphError, match=text):
        list(loader)
