"""Generators that inline stages hold open end with their run, not when the garbage collector comes."""

import gc

import pytest

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.usefixtures("no_leaks")


class Opened:
    """A user's generators, and how many of them are open."""

    def __init__(self):
        self.open = 0

    def rows(self, _=None):
        self.open += 1
        try:
            yield from range(500)
        finally:
            self.open -= 1

    def __iter__(self):  # of a sampler, whose draws are made by whoever waits for a position
        return self.rows()

    def __len__(self):
        return 500


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


def source(opened, graph, backend):
    return graph.add(ops.FromIterable(opened.rows), backend=backend)


def children(opened, graph, backend):
    return graph.add(ops.FromSequence(range(5))).then(ops.FlatMap(opened.rows), backend=backend)


def draws(opened, graph, backend):
    return graph.add(ops.FromSequence(range(500), sampler=opened), backend=backend)


@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("make", [source, children, draws])
@pytest.mark.parametrize("end", ["close", "next pass", "failure"])
def test_open_generators_end_with_the_run(make, backend, end, no_collector):
    opened = Opened()
    graph = pg.Graph("g")
    rows = make(opened, graph, backend)

    def refuse(x):
        if end == "failure" and x == 2:
            raise ValueError(x)
        return x

    rows.then(refuse, backend="inline")
    with graph.loader(epochs=None) as loader:
        items = iter(loader)
        assert next(items) == 0
        if end == "next pass":
            items = iter(loader)
            loader.set_epoch(7)
            items = iter(loader)  # the run before is over
            next(items)
        elif end == "failure":
            with pytest.raises(ValueError):
                list(items)
    assert opened.open == 0
    del items
