"""What operators and orders of users give back is counted and compared: nothing hangs, nothing is lost or doubled."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops


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
