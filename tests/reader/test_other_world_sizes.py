"""Saved with some number of ranks, resumed with another: nothing twice, nothing lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops

N = 1000

Make = Callable[[], pg.Graph]
Source = Callable[[], Any]

SOURCES: dict[str, Source] = {
    "strided": lambda: ops.FromSequence(list(range(N)), pg.order.StridedOrder()),
    "lanes": lambda: ops.FromSequence(list(range(N)), pg.order.LaneOrder()),
    "parts": lambda: ops.FromSequence(list(range(N)), pg.order.PartOrder()),
    "blocks": lambda: ops.FromSequence(list(range(N)), pg.order.BlockOrder(shuffle=True)),
    "iterable": lambda: ops.FromIterable(range(N)),
}


def elastic(source: Source, batch: Any, unbatch: bool = False, *above: Any) -> Make:
    def make() -> pg.Graph:
        graph = pg.Graph(seed=3)
        node = graph.add(source()).then(ops.Map(abs), workers=2)
        for each in (*above, batch):
            node = node.then(each())
        if unbatch:
            node.then(ops.Unbatch())
        return graph

    return make


def inelastic() -> pg.Graph:
    graph = pg.Graph(seed=3)
    node = graph.add(ops.FromSequence(list(range(N)), pg.order.StridedOrder()), workers=2)
    node.then(ops.Filter(lambda x: x % 3 != 0)).then(ops.Shuffle(20)).then(ops.Batch(8))
    return graph


def samples(chunk: pg.Chunk) -> list[int]:
    """Without the padded ones, whose positions lie past the end."""
    data = chunk.data.reshape(-1).tolist()
    return [value for value, position in zip(data, chunk.positions, strict=True) if position < N]


def deliver(make: Make, rank: int, size: int, state: Any, stop: int | None) -> tuple[list[list[int]], Any]:
    """One rank's next ``stop`` chunks from a state on (all with None), and its state then."""
    with make().loader(rank=rank, world_size=size, equal_steps=False) as loader:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        after = loader.state_dict()
        got = []
        for chunk in loader.chunks():
            got.append(samples(chunk))
            after = loader.state_dict()
            if stop is not None and len(got) == stop:
                break
        return got, after


def resized(make: Make, sizes: list[int], stops: Callable[[int], Any], every_rank: bool) -> list[int]:
    """All that is delivered while the world size changes from pass to pass."""
    seen: list[int] = []
    state: Any = None
    for size in sizes:
        last = size == sizes[-1]
        states = []
        for rank in range(size):
            got, after = deliver(make, rank, size, state, None if last else stops(size))
            seen += [value for chunk in got for value in chunk]
            states.append(after)
        state = states if every_rank else states[-1]
    return seen


@pytest.mark.parametrize("sizes", [[4, 2], [4, 3, 1], [2, 5, 2], [3, 1, 4, 1]], ids=str)
def test_with_all_ranks_states_a_graph_that_is_not_elastic_continues_with_each_sample_once(sizes):
    rng = random.Random(2)
    seen = resized(inelastic, sizes, lambda size: rng.randint(1, 5), every_rank=True)
    assert sorted(seen) == [i for i in range(N) if i % 3]
    split = elastic(SOURCES["strided"], lambda: ops.Batch(8), True, lambda: ops.Shuffle(20))
    assert sorted(resized(split, sizes, lambda size: 13, every_rank=True)) == list(range(N))


def test_without_them_it_is_an_error_that_names_the_stages():
    _, state = deliver(inelastic, 0, 4, None, 2)
    with pytest.raises(pg.errors.StateError, match=r"'filter', 'shuffle'.*list of all ranks' states"):
        deliver(inelastic, 0, 2, state, None)


def test_ranks_that_stand_at_different_steps_are_an_error_unless_all_states_are_given():
    make = elastic(SOURCES["strided"], lambda: ops.Batch(3))
    states = [deliver(make, rank, 2, None, 2 + rank)[1] for rank in range(2)]
    seen = [
        value for rank in range(2) for chunk in deliver(make, rank, 2, None, 2 + rank)[0] for value in chunk
    ]
    for rank in range(3):
        got, _ = deliver(make, rank, 3, states, None)
        seen += [value for chunk in got for value in chunk]
    assert sorted(seen) == list(range(N))
    with pytest.raises(pg.errors.StateError, match="missing: ranks 1"):
        deliver(inelastic, 0, 3, deliver(inelastic, 0, 2, None, 2)[1], None)


def test_the_plan_says_whether_and_why_not():
    assert "elastic: resumes at any world size" in str(
        elastic(SOURCES["lanes"], lambda: ops.Batch(3))().plan()
    )
    assert "because of: filter, shuffle" in str(inelastic().plan())
