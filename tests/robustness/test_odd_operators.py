"""Operators and functions as new users write them: what works, and what is said of the rest."""

import asyncio

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
