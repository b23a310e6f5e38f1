"""What operators and orders of users give back is counted and compared: nothing hangs, nothing is lost or doubled."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_an_expanding_operator_that_gives_one_chunk_twice_is_refused(backend):
    class Twice(pg.Operator):
        kind = "expand"
        one_to_one = False

        def process(self, chunk):
            child = chunk.child(0, chunk.data)
            return [child, child]

    graph = pg.Graph("twice")
    graph.add(ops.FromSequence(range(10))).then(Twice(), name="twice", backend=backend)
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="stage 'twice': process made two items of one identity"),
    ):
        list(loader)


class Late(pg.Operator):
    """Returns the chunk before the one that it is given, and has no state."""

    one_to_one = False

    def __init__(self):
        self.held = None

    def process(self, chunk):
        before, self.held = self.held, chunk
        return before


class LateFromItself(Late):
    """As above; the first chunk is returned twice."""

    one_to_one = True

    def process(self, chunk):
        before, self.held = self.held or chunk, chunk
        return before


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
@pytest.mark.parametrize("kind", [Late, LateFromItself])
def test_a_map_that_returns_an_earlier_chunk_is_refused(kind, backend):
    graph = pg.Graph("late")
    graph.add(ops.FromSequence(range(6)), name="numbers").then(kind(), name="late", backend=backend)
    seen = []
    said = "'late': process was given the sample of 'numbers' at position 1 and returned .* at position 0.*a state"
    with graph.loader() as loader, pytest.raises(GraphError, match=said):
        seen.extend(loader)
    assert seen == ([] if kind is Late else [0])


class Nothing(pg.Source):
    def length(self, epoch, rank, world_size):
        return 3


class NoRead(Nothing):
    random_access = True

    def positions(self, epoch, rank, world_size, start):
        return iter(range(start, 3))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            Nothing,
            r"stage 'rows': Nothing lacks iterate\(epoch, rank, world_size, start\), .*random_access = True",
        ),
        (
            NoRead,
            r"stage 'rows': NoRead has random_access = True, but lacks read: define .*read\(position, epoch\)",
        ),
    ],
)
def test_a_source_with_nothing_to_read_is_refused_by_the_plan(source, text):
    graph = pg.Graph("nothing")
    graph.add(source(), name="rows")
    with pytest.raises(GraphError, match=text):
        graph.plan()


def doubled(window):
    return window * 2


def forgets(item):
    item["x"] += 1


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_function_that_returns_none_is_named(backend, caplog):
    graph = pg.Graph("none")
    graph.add(ops.FromSequence([{"x": 1}] * 3)).then(forgets, name="add", backend=backend)
    with graph.loader() as loader:
        assert list(loader) == [None] * 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("stage 'add': forgets returned None for its first item")
    assert "without a return?" in said and "ops.Filter" in said
    caplog.clear()
    some = pg.Graph("some")  # a field that some samples lack is no mistake
    some.add(ops.FromSequence([{"x": 1}, {}])).then(lambda item: item.get("x"), backend=backend)
    with some.loader() as loader:
        assert list(loader) == [1, None]
    assert not caplog.records
