"""An iterable with a state of its own continues its epoch at another world size, from the state of the epoch's start."""

import json
from collections import Counter

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from tests.loader.counting import CountingOn

pytestmark = pytest.mark.usefixtures("no_leaks")

N = 400


def elastic():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(CountingOn(N)), name="numbers").then(ops.Batch(2, collate=list))
    return graph


def in_parts():
    graph = pg.Graph("g")
    numbers = graph.add(ops.FromIterable(CountingOn(N)), name="numbers")
    numbers.then(ops.Bucket(lambda x: x % 3, [1, 2], size=2)).then(ops.Batch(2, collate=list))
    return graph


def run(make, sizes, steps, epoch, **options):
    """What all ranks deliver of an epoch that is resumed at each of these world sizes in turn, as a list of numbers."""
    found, states = [], None
    for number, (size, stop) in enumerate(zip(sizes, steps, strict=True), 1):
        after = []
        for rank in range(size):
            with make().loader(rank=rank, world_size=size, equal_steps=False, epochs=3, **options) as loader:
                if states is None:
                    for _ in range(epoch):
                        list(loader)
                else:
                    loader.load_state_dict(states)
                passing = iter(loader)
                for _ in range(stop):
                    found += next(passing)
                after.append(json.loads(json.dumps(loader.state_dict())))
                if number == len(sizes):
                    found += [x for batch in passing for x in batch]
        states = after
    return found


@pytest.mark.parametrize("steps", [0, 2, 45])
@pytest.mark.parametrize(("size", "other"), [(2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("make", [elastic, in_parts])
@pytest.mark.parametrize("epoch", [0, 1])
def test_each_item_of_the_epoch_comes_once(make, size, other, steps, epoch):
    got = Counter(run(make, (size, other), (steps, 0), epoch))
    assert set(got) == set(range(epoch * N, epoch * N + N))
    assert sum(got.values()) <= N + 2 * other  # the last batches may be padded


@pytest.mark.parametrize("make", [elastic, in_parts])
def test_it_comes_once_through_several_resumes(make):
    sizes = (2, 2, 1, 2) if make is in_parts else (2, 2, 3, 1)
    assert sorted(run(make, sizes, (40, 10, 20, 0), 1)) == list(range(N, 2 * N))


def test_it_comes_once_with_a_process_between():
    assert sorted(run(elastic, (2, 1), (45, 0), 1, isolate=True)) == list(range(N, 2 * N))
