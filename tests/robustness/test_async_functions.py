"""Async functions in places that do not await them are refused where the graph is written, with the way out."""

import functools

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


async def awaited(x):
    return x


class Awaited:
    async def __call__(self, x):
        return x


def generates(x):
    yield x


async def items():
    yield 1


PLACES = {
    "collate": lambda function: ops.Batch(2, collate=function),
    "cost": lambda function: ops.Batch(cost=function, limit=3),
    "length": lambda function: ops.Bucket(function, [2]),
    "choose": lambda function: ops.Route(function, 2),
}


@pytest.mark.parametrize(
    "function", [awaited, functools.partial(awaited), Awaited(), Awaited().__call__, items]
)
@pytest.mark.parametrize("place", PLACES)
def test_an_async_function_is_refused_where_nobody_would_await_it(place, function):
    with pytest.raises(GraphError, match=rf"{place} must be a plain function.*async.*Map"):
        PLACES[place](function)


@pytest.mark.parametrize("place", PLACES)
def test_so_is_a_generator_function(place):
    with pytest.raises(GraphError, match=rf"{place} must be a plain function.*generator"):
        PLACES[place](generates)


def test_a_filter_awaits_its_predicate():
    async def even(x):
        return x % 2 == 0

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(6))).then(ops.Filter(even))
    with graph.loader() as loader:
        assert list(loader) == [0, 2, 4]
