"""States of graphs that were changed since: the sources continue, everything else begins anew."""

import json

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StateError

COUNT = 60


def numbers(start=0, count=COUNT):
    return ops.FromSequence(range(start, start + count))


def saved(make, steps, **options):
    """What a graph delivers in some steps, and its state."""
    with make().loader(**options) as loader:
        passing = iter(loader)
        return [next(passing) for _ in range(steps)], json.loads(json.dumps(loader.state_dict()))


def rest(make, state, allow, **options):
    """What another graph delivers of the epoch from a state, also after a resume behind each of its first items."""
    with make().loader(**options) as loader:
        with pytest.warns(
            pg.errors.PipegraphWarning, match="its sources continue where they stood, everything else"
        ):
            loader.load_state_dict(state, allow=allow)
        states = [json.loads(json.dumps(loader.state_dict()))]
        found = []
        for item in loader:
            found.append(item)
            states.append(json.loads(json.dumps(loader.state_dict())))
    for number, again in enumerate(states[:8]):
        with make().loader(**options) as loader:  # the state of the new graph needs no permission
            loader.load_state_dict(again)
            assert list(loader) == found[number:]
    return found


def chain(*stages, **named):
    def make():
        graph = pg.Graph("chain", seed=2)
        source = named["source"]() if "source" in named else numbers()
        node = graph.add(source, name="numbers")
        for name, operator in stages:
            node = node.then(operator() if isinstance(operator, type) else operator, name=name)
        return graph

    return make


def flat(items):
    return [x for item in items for x in item]


def same(x):
    return x


def renamed(x):
    return x


@pytest.mark.parametrize(
    ("before", "after", "allow"),
    [
        ([], [("map", same)], ["map"]),
        (
            [("map", same), ("batch", ops.Batch(4, collate=list))],
            [("batch", ops.Batch(4, collate=list))],
            ["map"],
        ),
        ([("batch", ops.Batch(4, collate=list))], [("batch", ops.Batch(6, collate=list))], ["batch"]),
    ],
)
def test_stages_that_hold_nothing_may_change_and_nothing_is_lost_or_comes_twice(before, after, allow):
    head, state = saved(chain(*before), 5)
    found = rest(chain(*after), state, allow)
    items = [each if isinstance(each, list) else [each] for each in head + found]
    assert flat(items) == list(range(COUNT))


@pytest.mark.parametrize(
    ("stages", "allow", "said"),
    [
        (
            [("map", renamed), ("batch", ops.Batch(4))],
            ["batch"],
            r"stage 'map' had the function \S+\.same, now \S+\.renamed",
        ),
        ([("batch", ops.Batch(4))], [], "stage 'map' of the state is not in the graph"),
        (
            [("map", same), ("batch", ops.Batch(4)), ("more", same)],
            ["map"],
            "stage 'more' is not in the state",
        ),
        ([("map", same), ("batch", ops.Batch(3))], ["other"], "neither graph has a stage 'other'"),
    ],
)
def test_what_is_not_named_is_refused_and_named(stages, allow, said):
    _, state = saved(chain(("map", same), ("batch", ops.Batch(4))), 2)
    with chain(*stages)().loader() as loader, pytest.raises(StateError, match=said):
        loader.load_state_dict(state, allow=allow)
