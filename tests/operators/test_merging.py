"""Fan-ins that end before their inputs do."""

import itertools
import threading

import pytest
import torch
from torch.utils.data import RandomSampler

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("no_leaks")


class Waits:
    """Items, and then a wait for whoever uses it: a live stream."""

    def __init__(self, items):
        self.items, self.waiting, self.resume = items, threading.Event(), threading.Event()

    def __call__(self, epoch):
        yield from range(self.items)
        if epoch == 0:
            self.waiting.set()
            self.resume.wait()
        yield from range(self.items, 2 * self.items)


class After:
    """Numbers that come once the event is set: nothing may end the epoch before."""

    def __init__(self, event):
        self.event = event

    def __iter__(self):
        assert self.event.wait(60)
        yield from range(3)


def in_a_thread(call):
    """What ``call`` returns, if it does so in time."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(20)
    return found[0] if found else "it hangs"


@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("merging", [ops.Zip(), ops.Mix([1, 1])], ids=["zip", "mix"])
def test_an_epoch_ends_while_an_input_that_nobody_needs_waits(merging, backend):
    stream = Waits(50)
    graph = pg.Graph("g", seed=3)
    short, long = (
        graph.add(ops.FromIterable(After(stream.waiting))),
        graph.add(ops.FromIterable(stream), name="stream", capacity=64),
    )
    graph.add(merging, short, long, backend=backend)
    with graph.loader(epochs=2) as loader:
        first = iter(loader)
        assert stream.waiting.wait(20)
        delivered = in_a_thread(lambda: list(first))
        stream.resume.set()
        assert delivered != "it hangs"
        if isinstance(merging, ops.Zip):
            assert delivered == [(0, 0), (1, 1), (2, 2)]
        assert list(loader) is not None  # and the next resumes behind what was not needed


def items_of(graph, epochs=1):
    """The items of each epoch."""
    with graph.loader(epochs=epochs) as loader:
        return [list(loader) for _ in range(epochs)]


def taken(count, endless=False, *behind):
    def make():
        graph = pg.Graph("g", seed=4)
        items = itertools.count if endless else (lambda: range(10))
        node = graph.add(ops.FromIterable(items)).then(lambda x, rng: (x, rng.integers(99)), workers=2)
        for operator in (ops.Take(count), *behind):
            node = node.then(operator)
        return graph

    return make


def test_take_ends_an_epoch_also_of_an_endless_stream():
    assert [x for x, _ in items_of(taken(4)())[0]] == [0, 1, 2, 3]
    assert len(items_of(taken(20)())[0]) == 10 and items_of(taken(0)()) == [[]]
    first, second = items_of(taken(3, True)(), epochs=2)
    assert [x for x, _ in first] == [x for x, _ in second] == [0, 1, 2] and first != second
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(10))).then(ops.Batch(3, collate=list)).then(ops.Take(2))
    with graph.loader() as loader:
        assert len(loader) == 2 and list(loader) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("count", [0, 4])
def test_take_resumes_exactly(count):
    assert_resumes_exactly(taken(count))
    assert_resumes_exactly(taken(count, True, ops.Shuffle(3)))


def test_a_state_at_the_end_of_an_epoch_cut_short_has_a_samplers_generator_where_the_next_one_draws():
    def made():
        rows, graph = range(5000), pg.Graph("cut short", seed=1)
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(5))
        drawn = graph.add(ops.FromSequence(rows, sampler=sampler))
        pairs = graph.add(ops.Zip(), drawn, graph.add(ops.FromSequence(rows)))
        graph.add(ops.Mix([1, 1]), pairs, graph.add(ops.FromSequence(range(4))))
        return graph.loader()

    with made() as loader:
        list(loader)
        state, expected = loader.state_dict(), list(loader)
    with made() as loader:
        loader.load_state_dict(state)
        assert list(loader) == expected
