"""Fan-ins that end before their inputs do."""

import threading

import pytest
import torch
from torch.utils.data import RandomSampler

import pipegraph as pg
from pipegraph import operators as ops

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
