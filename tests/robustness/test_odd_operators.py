"""Operators and functions as new users write them: what works, and what is said of the rest."""

import asyncio
import json

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import no_leaks

__all__ = ["no_leaks"]


pytestmark = pytest.mark.usefixtures("no_leaks")

PLACEMENTS = [{"backend": "inline"}, {"workers": 1}, {"workers": 3}, {"workers": 3, "ordered": False}]
placed = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


def numbers(items=8, **options):
    graph = pg.Graph("odd", seed=1)
    return graph, graph.add(ops.FromIterable(range(items)), name="source", **options)


class InSequence(pg.Source):
    """Its positions are NumPy's."""

    def length(self, epoch, rank, world_size):
        return 12

    def iterate(self, epoch, rank, world_size, start):
        for position in np.arange(12)[start:]:
            yield position, int(position)


class AtRandom(InSequence):
    random_access = True

    def positions(self, epoch, rank, world_size, start):
        return iter(np.arange(12)[start:])

    def read(self, position, epoch):
        return int(position)


@pytest.mark.parametrize("source", [InSequence, AtRandom])
@pytest.mark.parametrize("batched", [False, True])
def test_positions_may_be_numpy_integers_and_the_state_is_json(source, batched):
    def fail(x):
        if x == 2:
            raise ValueError(x)
        return x

    def graph():
        graph = pg.Graph("positions")
        node = graph.add(source(), name="source").then(lambda x: x, workers=2, ordered=batched)
        node = node.then(fail, name="fail", on_error=pg.Skip())
        if batched:
            node.then(ops.Batch(2, collate=list))
        return graph

    with graph().loader() as loader:
        chunks = loader.chunks()
        got = list(next(chunks).lineages) + list(next(chunks).lineages) + list(next(chunks).lineages)
        assert all(type(row[1]) is int for row in got)
        state = json.loads(json.dumps(loader.state_dict()))
    with graph().loader() as loader:
        loader.load_state_dict(state)
        got += [row for chunk in loader.chunks() for row in chunk.lineages]
    assert sorted(row[1] for row in got) == [0, 1, *range(3, 12)]


def test_hundreds_of_inline_stages_in_a_row_run():
    graph, node = numbers()
    for number in range(400):
        node = node.then(lambda x: x + 1, name=f"n{number}", backend="inline")
    assert "runs in a thread of its own: more than" in str(graph.plan())
    with graph.loader() as loader:
        assert list(loader) == list(range(400, 408))


@placed
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_what_is_no_exception_names_the_stage_that_raised_it(kind, placement):
    def leave(x):
        if x == 3:
            raise kind("enough")
        return x

    graph, node = numbers()
    node.then(leave, name="leaves", **placement).then(lambda x: x, name="below").then(
        lambda x: x, name="last"
    )
    got = []
    with graph.loader() as loader, pytest.raises(kind) as caught:
        for x in loader:
            got.append(x)
    if placement.get("ordered", True):
        assert got == [0, 1, 2]
    assert [text for text in caught.value.__notes__ if "stage" in text] == [
        "pipegraph: stage 'leaves', sample 3 at position 3, epoch 0"
    ]


class Forgets(pg.Operator):
    """Forgets to return its chunk."""

    def process(self, chunk):
        chunk.data = chunk.data + 1


class Counts(Forgets):
    """Has a state besides."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Drops(pg.Operator):
    """Says that it drops."""

    one_to_one = False

    def process(self, chunk):
        return chunk if chunk.data % 2 else None


@placed
@pytest.mark.parametrize("operator", [Forgets, Counts])
def test_an_operator_that_forgets_to_return_is_told_so(operator, placement):
    graph, node = numbers()
    node.then(operator(), name="forgets", **placement)
    with graph.loader() as loader, pytest.raises(TypeError) as caught:
        list(loader)
    assert str(caught.value) == (
        "stage 'forgets': process must return a Chunk, got None: return the chunk, or declare one_to_one = False on "
        f"{operator.__name__} if it drops some"
    )


@placed
def test_an_operator_that_drops_says_so(placement):
    graph, node = numbers()
    node.then(Drops(), **placement)
    with graph.loader() as loader:
        assert sorted(loader) == [1, 3, 5, 7]


async def twice(x):
    await asyncio.sleep(0)
    return 2 * x


async def twice_drawn(x, rng):
    return await twice(x)


@placed
@pytest.mark.parametrize(
    "function", [lambda x: twice(x), lambda x, rng: twice_drawn(x, rng)], ids=["plain", "with rng"]
)
def test_a_lambda_around_an_async_function_says_what_to_give_instead(function, placement):
    for batch in (False, True):
        graph, node = numbers()
        node = node.then(function, name="wrapped", **placement)
        if batch:
            node.then(ops.Batch(2))
        with (
            graph.loader() as loader,
            pytest.raises(TypeError, match="returned a coroutine: pass the async function"),
        ):
            list(loader)
