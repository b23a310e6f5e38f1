"""What the training loop changes between epochs is what the next one reads: samplers, iterables, data."""

from __future__ import annotations

import pytest

import pipegraph as pg
from pipegraph import operators as ops

EPOCHS = 4
WAYS = {
    "inline": {"backend": "inline"},
    "threads": {"workers": 2},
    "processes": {"workers": 2, "backend": "process"},
}


class Weights:
    """A sampler of one number, which the loop chooses."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return iter([self.number] * 6)

    def __len__(self):
        return 6


def passes(graph, change, epochs=EPOCHS, **options):
    """The items of each epoch; ``change`` is called before each."""
    found = []
    with graph.loader(epochs=epochs, **options) as loader:
        for epoch in range(EPOCHS):
            change(epoch)
            found.append([int(item) for item in loader])
    return found


@pytest.mark.parametrize("epochs", [EPOCHS, None], ids=["four epochs", "endless"])
@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_that_the_loop_changes_is_asked_when_its_pass_begins(way, epochs):
    sampler = Weights()
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(100), sampler=sampler), **WAYS[way])
    found = passes(graph, lambda epoch: setattr(sampler, "number", 10 * epoch), epochs)
    assert found == [[10 * epoch] * 6 for epoch in range(EPOCHS)]


@pytest.mark.parametrize("way", ["inline", "threads"])
@pytest.mark.parametrize("kind", ["list", "generator function", "object"])
def test_an_iterable_that_the_loop_changes_is_asked_when_its_pass_begins(kind, way):
    items = [0, 1]

    class Items:
        def __iter__(self):
            return iter(items)

    given = {"list": items, "generator function": lambda: iter(list(items)), "object": Items()}[kind]
    graph = pg.Graph()
    node = graph.add(ops.FromIterable(given), backend=WAYS[way].get("backend", "thread"))
    node.then(abs, **WAYS[way])

    def change(epoch):
        if epoch:
            items[:] = [2 * epoch, 2 * epoch + 1]

    assert passes(graph, change) == [[2 * epoch, 2 * epoch + 1] for epoch in range(EPOCHS)]


def test_set_epoch_and_a_resume_ask_the_sampler_anew_too():
    sampler = Weights()
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(100), sampler=sampler), workers=2)
    with graph.loader(epochs=EPOCHS) as loader:
        list(loader)
        sampler.number = 7
        loader.set_epoch(3)
        assert list(loader) == [7] * 6
        state = loader.state_dict()
    with graph.loader(epochs=8) as loader:
        loader.load_state_dict(state)
        for number in (8, 9):
            sampler.number = number
            assert list(loader) == [number] * 6
