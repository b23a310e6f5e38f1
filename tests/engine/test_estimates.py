"""Objects without buffers of their own count under ``memory_limit`` too."""

from __future__ import annotations

import io
import logging
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.tree import buffers

MB = 1_000_000


class Plain:
    def __init__(self, value):
        self.value = value
        self.parent = self


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value):
        self.value = value


@dataclass
class Record:
    names: set
    number: int = 0


def nbytes(value):
    return sum(size for _, size in buffers(value))


def pillow():
    return pytest.importorskip("PIL.Image").new("RGB", (1000, 1000))


def arrow():
    return pytest.importorskip("pyarrow").table({"x": np.zeros(MB, np.uint8)})


THINGS = {
    "an image": pillow,
    "a table": arrow,
    "a plain object": lambda: Plain(np.zeros(MB, np.uint8)),
    "a slotted object": lambda: Slotted(torch.zeros(MB, dtype=torch.uint8)),
    "objects in objects": lambda: Plain([Slotted(Plain(bytes(MB)))]),
    "a dataclass without arrays": lambda: Record({str(number) for number in range(20_000)}),
    "a stream": lambda: io.BytesIO(bytes(MB)),
    "a set": lambda: set(range(40_000)),
    "a frozen set of texts": lambda: frozenset(str(number) * 10 for number in range(20_000)),
    "a deque": lambda: deque(range(40_000)),
    "an array of objects": lambda: np.array(["x" * 1000 for _ in range(1000)], object),
}


@pytest.mark.parametrize("name", THINGS)
def test_objects_count_about_what_they_hold(name):
    thing = THINGS[name]()
    assert 0.7 * MB <= nbytes(thing) <= 6 * MB
    assert nbytes({"key": "a", "thing": thing}) == pytest.approx(nbytes(thing), rel=0.01)
    assert nbytes([thing, thing]) == pytest.approx(nbytes(thing), rel=0.01)


def test_what_items_share_does_not_count():
    assert nbytes(Plain(np)) < 1000
    assert nbytes(Plain(Plain)) < 1000
    assert nbytes(Plain(THINGS)) < 10_000
    assert nbytes(torch.zeros(3)) == 12


def test_items_without_buffers_stay_within_the_limit():
    made, alive = weakref.WeakSet(), []

    def make(number):
        item = Slotted(tuple(str(number * place) * 5 for place in range(1000)))
        made.add(item)
        alive.append(len(made))
        return item

    one = nbytes(make(1))
    graph = pg.Graph()
    node = graph.add(ops.FromIterable(range(400)), capacity=400).then(make, capacity=400, workers=2)
    node.then(lambda item: item, capacity=400)
    with graph.loader(memory_limit=20 * one) as loader:
        for _ in loader:
            assert loader._runtime.run.account.used <= 20 * one
    assert max(alive) < 60


def test_a_stage_whose_items_have_no_size_is_named_once(caplog):
    class Closed:  # as a type of a library in C, without attributes
        __slots__ = ()

    del Closed.__slots__
    graph = pg.Graph()
    graph.add(ops.FromIterable(range(10))).then(lambda x: Closed(), name="odd", workers=2)
    with caplog.at_level(logging.WARNING, "pipegraph"), graph.loader() as loader:
        for _ in range(3):
            list(loader)
    (message,) = [each.getMessage() for each in caplog.records]
    assert "Closed, whose bytes nothing tells" in message
    assert "capacity=" in message


def test_rows_that_are_arrays_of_objects_count_in_bundles_too():
    made = []

    def row(number):
        made.append(number)
        return np.array([np.zeros(MB, np.uint8), None], dtype=object)

    graph = pg.Graph()
    graph.add(ops.FromSequence(range(64))).then(row, name="rows")
    with graph.loader() as loader:
        assert all(chunk.nbytes > MB / 2 for chunk in loader.chunks())
        assert loader.profile().stages["rows"].nbytes > 32 * MB
