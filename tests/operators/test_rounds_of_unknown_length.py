"""Rounds of a source whose length nobody knows, below a stage with ``ordered=False``: exact resume, and a small state."""

import itertools
import json
from collections import Counter

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.loader import delivered

pytestmark = pytest.mark.usefixtures("no_leaks")


def stream(epoch):
    """Shorter and longer from epoch to epoch."""
    yield from range(3 + epoch % 3)


class Unsized(pg.Source):
    """Of other lengths in each round, which it does not say; its positions are its own."""

    def iterate(self, epoch, rank, world_size, start):
        for step in itertools.islice(range(rank, 5 + epoch % 2, world_size), start, None):
            yield step, step


class Backwards(pg.Source):
    """Its positions follow from its steps as only it knows."""

    def iterate(self, epoch, rank, world_size, start):
        yield from ((100 - step, step) for step in range(start, 5))

    def positions_of(self, steps, epoch, rank, world_size):
        return [100 - step for step in steps]


SOURCES = {
    "iterable": lambda: ops.FromIterable(stream),
    "unsharded": lambda: ops.FromIterable(stream, shard=False),
    "unsized": Unsized,
    "backwards": Backwards,
}


def drawn(x, rng):
    """No two samples of an epoch are alike."""
    return x, int(rng.integers(1 << 60))


def repeated(kind, workers=2, capacity=None, rounds=3, **options):
    def make():
        graph = pg.Graph("g", seed=3)
        source = graph.add(SOURCES[kind](), name="source", **options)
        source.then(drawn, ordered=False, workers=workers, capacity=capacity).then(ops.Repeat(rounds))
        return graph

    return make


def joined(operator):
    def make():
        graph = pg.Graph("g", seed=3)
        inputs = []
        for number, kind in enumerate(("interleave", "iterable")):
            node = graph.add(SOURCES[kind](), name=f"s{number}").then(drawn, ordered=False, workers=2)
            inputs.append(node if isinstance(operator, ops.Mix) else node.then(ops.Repeat(2)))
        graph.add(operator, *inputs)
        return graph

    return make


def parts_of(make, **options):
    """For each number of items of two epochs: the items of the latest before a state, and those of a fresh graph after."""
    whole = []
    with make().loader(epochs=2, **options) as loader:
        for _ in range(2):
            whole.append(list(loader))
    for epoch, items in enumerate(whole):
        for count in range(1, len(items)):
            with make().loader(epochs=2, **options) as loader:
                if epoch:
                    list(loader)
                passing = iter(loader)
                head = [next(passing) for _ in range(count)]
                state = json.loads(json.dumps(loader.state_dict()))
            with make().loader(epochs=2, **options) as loader:
                loader.load_state_dict(state)
                yield items, head + list(loader)


@pytest.mark.parametrize("every", [1, 64])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_round_comes_whole_and_resumes_exactly(kind, every, monkeypatch):
    monkeypatch.setattr(delivered, "FORGET_EVERY", every)
    one_by_one = repeated(kind, 1)
    with one_by_one().loader() as loader:
        assert Counter(x for x, _ in loader)[0] == 3
    for items, found in parts_of(one_by_one):
        assert sorted(found) == sorted(items)


@pytest.mark.parametrize(("kind", "workers", "capacity"), [("interleave", 2, 1), ("iterable", 3, None)])
@pytest.mark.parametrize("rank", [0, 1])
def test_with_several_workers_and_ranks(kind, workers, capacity, rank, monkeypatch):
    monkeypatch.setattr(delivered, "FORGET_EVERY", 1)
    make = repeated(kind, workers, capacity)
    for items, found in parts_of(make, rank=rank, world_size=2, equal_steps=False):
        assert sorted(found) == sorted(items)


@pytest.mark.parametrize("operator", [ops.Concat(), ops.Mix([1, 2], stop="repeat")], ids=["concat", "mix"])
def test_repeated_inputs_of_a_fan_in_resume_exactly(operator, monkeypatch):
    monkeypatch.setattr(delivered, "FORGET_EVERY", 1)
    for items, found in parts_of(joined(operator)):
        assert len(set(found)) == len(found)
        if isinstance(operator, ops.Concat):
            assert sorted(found) == sorted(items)
        else:  # which samples meet the end depends on the order of completion
            assert Counter(x for x, _ in found).keys() == Counter(x for x, _ in items).keys()
