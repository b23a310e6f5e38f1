"""A Cache below what the training loop changes: its results are made again, and a warning says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError, PipegraphWarning
from tests.loader.test_changes_between_epochs import EPOCHS, WAYS, Numbers, Weights, passes

pytestmark = pytest.mark.usefixtures("no_leaks")


class Times:
    """A function whose attribute the loop changes."""

    def __init__(self):
        self.by = 1

    def __call__(self, x):
        return int(x) * self.by


class Counting(Numbers):
    """Notes each read in itself."""

    def __init__(self, items):
        super().__init__(items)
        self.reads = []

    def __getitem__(self, index):
        self.reads.append(index)
        return super().__getitem__(index)


class Opening(Numbers):
    """Opens its items at the first read."""

    opened = None
    reads = 0

    def __getitem__(self, index):
        if self.opened is None:
            self.opened = list(self.items)
        type(self).reads += 1
        return self.opened[index]


class Table(pg.Operator):
    """Has a table of its own, which the loop changes."""

    depends_on = "item"

    def __init__(self):
        self.table = list(range(10))

    def process(self, chunk):
        return chunk.replace(self.table[chunk.data])


def cached(graph, node, where):
    node.then(ops.Cache(where, "1 MB"), name="kept")
    return graph


@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("epochs", [1, EPOCHS])
@pytest.mark.parametrize("of", ["data", "array", "function", "operator"])
def test_a_cache_below_what_the_loop_changes_gives_the_new_values(way, of, where, epochs, tmp_path):
    items = np.arange(3) if of == "array" else [0, 1, 2]
    data, function, operator = Numbers(items), Times(), Table()
    made = {"function": function, "operator": operator}.get(of, abs)
    graph = pg.Graph()
    node = graph.add(ops.FromSequence(data), name="numbers", **WAYS[way]).then(made, name="made", **WAYS[way])
    cached(graph, node, tmp_path if where == "folder" else where)

    def change(epoch):
        if epoch == 2 and of == "function":
            function.by = 5
        elif epoch == 2 and of == "operator":
            operator.table[1] = 5
        elif epoch == 2:
            items[1] = 5

    new = [0, 5, 10 if of == "function" else 2]
    named = {"function": "what the function of stage 'made' reads", "operator": "stage 'made'"}
    what = named.get(of, "the data of stage 'numbers'")
    means = (
        f"this loader stops using {tmp_path}" if where == "folder" else "its results are dropped and computed"
    )
    with pytest.warns(PipegraphWarning) as caught:
        assert passes(graph, change, epochs) == [[0, 1, 2]] * 2 + [new] * 2
    (warning,) = caught
    assert warning.filename == passes.__code__.co_filename
    assert str(warning.message).startswith(
        f"stage 'kept': {what} has changed since the cache was filled, so {means}"
    )


def test_a_cache_sees_what_the_loop_changes_within_a_pass():
    data = Numbers([0, 1, 2])
    graph = pg.Graph()
    cached(graph, graph.add(ops.FromSequence(data), backend="inline"), "memory")
    with graph.loader() as loader:
        for _ in loader:
            data.items[0] = 7  # a label, after the first item
        with pytest.warns(PipegraphWarning, match="has changed since the cache was filled"):
            assert list(loader) == [7, 1, 2]


@pytest.mark.parametrize("kind", [Counting, Opening])
def test_a_cache_is_kept_below_a_dataset_that_changes_itself_when_it_is_read(kind):
    data = kind([0, 1, 2])
    kind.reads = 0
    graph = pg.Graph()
    cached(graph, graph.add(ops.FromSequence(data), backend="inline"), "memory")
    with graph.loader() as loader:
        assert [list(loader) for _ in range(3)] == [[0, 1, 2]] * 3
        assert (len(data.reads) if kind is Counting else kind.reads) == 3
        if kind is Opening:
            data.opened[0] = 8
            with pytest.warns(PipegraphWarning, match="the data of stage 'fromsequence' has changed"):
                assert list(loader) == [8, 1, 2]


def test_a_cache_is_kept_when_only_the_sampler_changes():
    class Reads(Numbers):
        reads = 0

        def __getitem__(self, index):
            type(self).reads += 1
            return super().__getitem__(index)

    sampler = Weights()
    graph = pg.Graph()
    cached(graph, graph.add(ops.FromSequence(Reads(list(range(100))), sampler=sampler)), "memory")
    found = passes(graph, lambda epoch: setattr(sampler, "number", epoch % 2))
    assert found == [[epoch % 2] * 6 for epoch in range(EPOCHS)]
    assert Reads.reads <= 2 * 6


class Box:
    def __init__(self, x):
        self.x = x


def add_in_place(value):
    if isinstance(value, Box):
        value.x += 1
        return value.x
    value += 1
    return int(value)


@pytest.mark.parametrize(("way", "epochs"), [("inline", 1), ("inline", EPOCHS), ("threads", 1)])
@pytest.mark.parametrize("kind", [Box, torch.tensor, np.array])
def test_a_function_that_changes_in_place_what_a_cache_keeps_changes_no_other_epoch(kind, way, epochs):
    graph = pg.Graph()
    made = graph.add(ops.FromSequence(range(20)), **WAYS[way]).then(kind, name="made", **WAYS[way])
    made.then(ops.Cache("memory", "1 MB"), name="kept").then(add_in_place, **WAYS[way])
    with pytest.warns(PipegraphWarning) as caught:
        assert passes(graph, lambda epoch: None, epochs) == [list(range(1, 21))] * EPOCHS
    (warning,) = caught
    assert str(warning.message).startswith(
        "stage 'kept': a stage behind it has changed in place what the cache keeps."
    )


def test_a_cache_refuses_what_can_be_read_only_once():
    graph = pg.Graph()
    made = graph.add(ops.FromSequence(range(3))).then(lambda x: (y for y in range(x)), name="made")
    made.then(ops.Cache("memory", "1 MB"), name="kept")
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="Cache: a result is or contains .*; return a list"),
    ):
        list(loader)
