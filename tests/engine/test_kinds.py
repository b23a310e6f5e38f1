"""Each operator has a kind, and a kind is an entry in one table."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.kinds import KINDS
from pipegraph.errors import GraphError


class Odd(pg.Operator):
    kind = "odd"

    def process(self, chunk):
        return chunk


def test_an_unknown_kind_is_refused_with_the_known_ones():
    graph = pg.Graph("odd")
    graph.add(ops.FromIterable(range(3))).then(Odd())
    with pytest.raises(GraphError, match="odd: kind is 'odd', and must be one of 'source', 'map', 'expand'"):
        graph.plan()


def test_a_new_kind_is_a_class_and_its_entry_in_the_table(monkeypatch):
    class LikeMap(type(KINDS["map"])):
        def level(self, operator, inputs):
            return "batch"

    monkeypatch.setitem(KINDS, "odd", LikeMap())
    graph = pg.Graph("odd")
    graph.add(ops.FromIterable(range(3))).then(Odd(), name="odd")
    stage = graph.plan().stages["odd"]
    assert stage.level == "batch"
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2]
