"""A state knows how many chunks of its epoch its rank has delivered: one value with the cursor, wherever it is resumed."""

import json

import pytest

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.usefixtures("no_leaks")


def graph_of(source, *operators):
    graph = pg.Graph("g")
    node = graph.add(source, name="rows")
    for operator in operators:
        node = node.then(operator)
    return graph


def batches(size=2):
    return graph_of(ops.FromSequence(range(240)), ops.Batch(size, collate=list))


def rows():
    return graph_of(ops.FromSequence(range(120)))


def unordered():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(240))).then(lambda x: x, name="loose", ordered=False, workers=2).then(
        ops.Batch(2, collate=list)
    )
    return graph


def saved(loader, steps=0):
    """The state after some more steps of a pass, and what it says of them."""
    if steps:
        passing = iter(loader)
        for _ in range(steps):
            next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    (part,) = (each for key, each in state.items() if key.startswith("rank"))
    return state, part["chunks"]


@pytest.mark.parametrize("make", [rows, batches, unordered])
def test_the_steps_of_an_epoch_continue_in_each_resume(make):
    whole = len(list(make().loader()))
    state, at = None, 0
    for steps in (1, 4, 30):
        with make().loader() as loader:
            if state is not None:
                loader.load_state_dict(state)
            assert len(loader) == whole - at
            state, counted = saved(loader, steps)
            at += steps
            assert counted == at
    with make().loader(epochs=2) as loader:
        loader.load_state_dict(state)
        list(loader)
        assert saved(loader)[1] == 0
        assert saved(loader, 3)[1] == 3


@pytest.mark.parametrize(("size", "other"), [(1, 2), (2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("make", [rows, batches])
def test_the_steps_of_an_epoch_are_known_at_another_world_size(make, size, other):
    states = []
    for rank in range(size):
        with make().loader(rank=rank, world_size=size) as loader:
            states.append(saved(loader, 5)[0])
    for given in (states, states[0]):
        for rank in range(other):
            with make().loader(rank=rank, world_size=other) as loader:
                loader.load_state_dict(given)
                left = len(loader)
                assert left == -((5 * size - 120) // other)  # the last ones are padded
                assert saved(loader)[1] == 5
                again, counted = saved(loader, 3)
                assert counted == 8
            with make().loader(rank=rank, world_size=other) as loader:
                loader.load_state_dict(again)
                assert len(loader) == left - 3
                assert len(list(loader)) == left - 3
