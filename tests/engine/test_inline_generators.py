"""Generators that inline stages hold open end with their run, not when the garbage collector comes."""

import gc
import threading
from collections.abc import Generator

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.stage_pump import StagePump

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


class KeptFrame(Generator):
    """A generator as of Python 3.12.3, which does not clear the frame of one that it closes."""

    def __init__(self, inner):
        self._inner = inner

    def send(self, value):
        return self._inner.send(value)

    def throw(self, *error):
        return self._inner.throw(*error)

    def close(self):
        pass


@pytest.fixture(params=["this python", "a python that keeps closed frames"])
def python(request, monkeypatch):
    if request.param != "this python":
        begin = StagePump.__init__
        monkeypatch.setattr(
            StagePump, "__init__", lambda pump, loop, *given: begin(pump, KeptFrame(loop), *given)
        )


def source(opened, graph, backend):
    return graph.add(ops.FromIterable(opened.rows), backend=backend)


def children(opened, graph, backend):
    return graph.add(ops.FromSequence(range(5))).then(ops.FlatMap(opened.rows), backend=backend)


def draws(opened, graph, backend):
    return graph.add(ops.FromSequence(range(500), sampler=opened), backend=backend)


@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("make", [source, children, draws])
@pytest.mark.parametrize("end", ["close", "next pass", "failure"])
def test_open_generators_end_with_the_run(make, backend, end, no_collector, python):
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


def test_a_close_from_another_thread_leaves_the_generator_to_whoever_drives_it(no_collector):
    opened, inside = Opened(), threading.Event()

    def rows():
        opened.open += 1
        try:
            yield 0
            inside.set()
            assert loader._crew.stopping.wait(30)  # the consumer's thread is in here while the loader closes
            closer.join(30)
            assert opened.open == 1
            yield 1
        finally:
            opened.open -= 1

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(rows), backend="inline")
    loader = graph.loader()

    def close():
        assert inside.wait(30)
        loader.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(pg.errors.LoaderClosedError):
        list(loader)
    assert opened.open == 0 and not closer.is_alive()
