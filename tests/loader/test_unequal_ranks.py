"""Graphs whose ranks consume unequally, resumed with another number of ranks: each sample once, in equal steps."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.order import BlockOrder, LaneOrder, PartOrder, StridedOrder
from tests.loader.test_equal_steps import Ranks

pytestmark = pytest.mark.usefixtures("no_leaks")

N = 240
SIZES = {"low": 90, "high": 150}
ORDERS = {
    "strided": StridedOrder(shuffle=True),
    "lanes": LaneOrder(),
    "parts": PartOrder(tail="uneven"),
    "blocks": BlockOrder(shuffle=True),
}


def keep(x: int) -> bool:
    return x % 8 != 1 and not 40 < x < 70


def filtered(order: Any = None) -> pg.Graph:
    graph = pg.Graph("filtered", seed=3)
    source = ops.FromSequence(range(N), order or StridedOrder(shuffle=False))
    graph.add(source).then(ops.Filter(keep)).then(ops.Batch(4, collate=list))
    return graph


def scattered() -> pg.Graph:
    graph = pg.Graph("scattered", seed=3)
    numbers = graph.add(ops.FromSequence(range(N), StridedOrder(shuffle=False)))
    numbers.then(ops.Filter(lambda x: x * 7919 % 101 % 4)).then(ops.Batch(4, collate=list))
    return graph


def iterated() -> pg.Graph:
    graph = pg.Graph("iterated", seed=3)
    graph.add(ops.FromIterable(range(N))).then(ops.Filter(keep)).then(ops.Batch(4, collate=list))
    return graph


def shuffled(order: Any = None) -> pg.Graph:
    graph = pg.Graph("shuffled", seed=3)
    source = ops.FromSequence(range(N), order or StridedOrder())
    graph.add(source).then(ops.Shuffle(11)).then(ops.Batch(4, collate=list))
    return graph


def shuffled_batches() -> pg.Graph:
    graph = pg.Graph("shuffled-batches", seed=3)
    batches = graph.add(ops.FromSequence(range(N), StridedOrder())).then(ops.Batch(3, collate=list))
    batches.then(ops.Shuffle(5))
    return graph


def filtered_and_shuffled() -> pg.Graph:
    graph = pg.Graph("both", seed=3)
    kept = graph.add(ops.FromSequence(range(N), StridedOrder())).then(ops.Filter(keep))
    kept.then(ops.Shuffle(11)).then(ops.Batch(4, collate=list))
    return graph


def mixed(stop: str = "all") -> pg.Graph:
    graph = pg.Graph("mixed", seed=3)
    low = graph.add(ops.FromSequence(range(90), StridedOrder()), name="low").then(ops.Filter(keep))
    high = graph.add(ops.FromIterable(range(90, N)), name="high").then(ops.Shuffle(7))
    graph.add(ops.Mix([1, 2], stop=stop), low, high).then(ops.Batch(4, collate=list))
    return graph


def chained() -> pg.Graph:
    graph = pg.Graph("chained", seed=3)
    low = graph.add(ops.FromSequence(range(90), StridedOrder()), name="low")
    high = graph.add(ops.FromIterable(range(90, N)), name="high")
    graph.add(ops.Concat(), low, high).then(ops.Batch(4, collate=list))
    return graph


def by_cost() -> pg.Graph:
    graph = pg.Graph("cost", seed=3)
    source = graph.add(ops.FromSequence(range(N), StridedOrder()))
    source.then(ops.Batch(cost=lambda x: 1 + x % 7, limit=20, collate=list))
    return graph


def flat(data: Any) -> list[int]:
    return list(data) if isinstance(data, list) else [data]


def part(make: Any, rank: int, size: int, state: Any, stop: int | None, equal: bool | None) -> Any:
    """What a rank delivers, its state then, and how many chunks it said there were."""
    with make().loader(rank=rank, world_size=size, equal_steps=equal) as loader:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        try:
            length: int | None = len(loader)
        except TypeError:
            length = None
        got: list[list[int]] = []
        after = loader.state_dict()
        for chunk in loader.chunks():
            places = zip(flat(chunk.data), chunk.positions, chunk.sources, strict=True)
            got.append([x for x, position, source in places if position < SIZES.get(source, N)])  # no padding
            after = loader.state_dict()
            if len(got) == stop:
                break
        return got, after, length


KNOWN = {
    "filter": filtered,
    "filter of an iterable": iterated,
    "shuffle": shuffled,
    "shuffle of batches": shuffled_batches,
    "filter and shuffle": filtered_and_shuffled,
    "mix": mixed,
    "concat": chained,
    "batch by cost": by_cost,
    **{f"filter, {name}": lambda order=order: filtered(order) for name, order in ORDERS.items()},
    **{f"shuffle, {name}": lambda order=order: shuffled(order) for name, order in ORDERS.items()},
}


@pytest.mark.parametrize("sizes", [[1, 2, 3], [2, 3, 1], [3, 2, 4]], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_each_sample_comes_once_and_no_rank_is_left_with_much_more_than_another(name, sizes):
    make, seen, state = KNOWN[name], Counter(), None
    for turn, size in enumerate(sizes):
        last = turn == len(sizes) - 1
        parts = [
            part(make, rank, size, state, None if last else 2 + rank % 2 + turn, False)
            for rank in range(size)
        ]
        for got, _, _ in parts:
            seen.update(x for chunk in got for x in chunk)
        state = [after for _, after, _ in parts]
    counts = [sum(map(len, got)) for got, _, _ in parts]
    wanted = {x for x in range(N) if "filter" not in name or keep(x)}
    if name == "mix":
        wanted = {x for x in range(N) if x >= 90 or keep(x)}
    assert set(seen) == wanted and set(seen.values()) == {1}
    if "parts" not in name:
        assert max(counts) - min(counts) <= 24


@pytest.mark.parametrize("name", ["shuffle", "shuffle of batches", "concat", "shuffle, lanes"])
def test_where_steps_are_known_all_ranks_have_as_many_left_as_len_says(name):
    make = KNOWN[name]
    for size, other in ((2, 3), (3, 2), (1, 4)):
        states = [part(make, rank, size, None, 3, None)[1] for rank in range(size)]
        left = [part(make, rank, other, states, None, None) for rank in range(other)]
        assert len({len(got) for got, _, _ in left}) == 1
        assert all(length == len(got) for got, _, length in left)


@pytest.mark.parametrize(("size", "other"), [(1, 2), (2, 3), (3, 2), (3, 1), (2, 4)])
@pytest.mark.parametrize(
    "make", [scattered, mixed, lambda: mixed("first")], ids=["filter", "mix", "mix-first"]
)
def test_ranks_that_agree_on_equal_steps_go_on_together_at_another_size(monkeypatch, make, size, other):
    before = Ranks(size, monkeypatch).together(lambda rank: part(make, rank, size, None, 4, size > 1))
    states = [after for _, after, _ in before]
    rest = Ranks(other, monkeypatch).together(lambda rank: part(make, rank, other, states, None, other > 1))
    steps = {len(got) for got, _, _ in rest}
    assert len(steps) == 1 and steps.pop() > 0
    seen = Counter(x for got, _, _ in (*before, *rest) for chunk in got for x in chunk)
    assert set(seen.values()) == {1}
    if make is scattered:  # what agreement cuts off is the tail of some ranks, never a whole rank's part
        assert len(seen) >= 0.85 * sum(1 for x in range(N) if x * 7919 % 101 % 4)


def test_what_is_delivered_of_a_part_taken_over_is_released():
    def make() -> pg.Graph:
        graph = pg.Graph("parts", seed=3)
        graph.add(ops.FromSequence([np.full(1000, x) for x in range(12)])).then(np.copy, ordered=False)
        return graph

    states = []
    for rank in range(2):
        with make().loader(rank=rank, world_size=2, equal_steps=False) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    with make().loader() as loader:
        loader.load_state_dict(states)
        assert len(list(loader)) == 10
        assert loader.profile().memory_bytes == 0
