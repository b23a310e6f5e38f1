"""Generator functions belong into ``FlatMap``; elsewhere their items would get lost."""

from __future__ import annotations

from functools import partial

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def twice(x, times=2):
    for _ in range(times):
        yield x


class Calls:
    def __call__(self, x):
        yield x

    def method(self, x):
        yield x


@pytest.mark.parametrize("function", [twice, partial(twice, times=3), Calls(), Calls().method])
def test_a_generator_function_is_refused_where_its_items_would_get_lost(function):
    node = pg.Graph("g").add(ops.FromIterable(range(3)))
    with pytest.raises(pg.errors.GraphError, match=r"is a generator function.*ops\.FlatMap"):
        node.then(function)
    with pytest.raises(pg.errors.GraphError, match=r"Filter: .* is a generator function"):
        node.then(ops.Filter(function))


@pytest.mark.parametrize(
    "source",
    [
        lambda graph, value: graph.add(ops.FromIterable([1])).then(ops.FlatMap(lambda x: value)),
        lambda graph, value: graph.add(ops.FromIterable(lambda: value)),
        lambda graph, value: graph.add(ops.FromIterable(value)),
    ],
)
def test_a_set_is_refused_as_its_order_differs_from_run_to_run(source):
    # Another rank, or a resumed run, hashes texts with another seed: items came twice and others never.
    for value in ({"a", "b"}, frozenset("ab")):
        graph = pg.Graph("g")
        with pytest.raises((TypeError, pg.errors.GraphError), match=r"a set, .* give sorted\(items\)"):
            source(graph, value)
            list(graph.loader())
