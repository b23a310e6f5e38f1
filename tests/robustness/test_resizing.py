"""Every kind of graph resumed with another number of ranks: no sample lost or doubled, or an error that names the stage."""

import collections
import itertools
import json

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StateError

SAMPLES = 240


class Counts(pg.Operator):
    def __init__(self):
        self.seen = 0

    def process(self, chunk):
        self.seen += 1
        return chunk

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def zipped(node):
    return node.graph.add(ops.Zip(), node, node.then(lambda x: x)).then(lambda pair: pair[0])


def routed(node):
    outputs = node.then(ops.Route(lambda x: x % 2, 2))
    return node.graph.add(ops.Merge(), outputs[0].then(lambda x: x), outputs[1])


ELASTIC = {
    "map": lambda node: node.then(lambda x: x, workers=2),
    "filter": lambda node: node.then(ops.Filter(lambda x: x % 7)),
    "shuffle": lambda node: node.then(ops.Shuffle(16)),
}
WHOLE_PARTS = {
    "bucket": lambda node: node.then(ops.Bucket(lambda x: x % 10, [3, 6], size=4)),
    "flat map": lambda node: node.then(ops.FlatMap(lambda x: [x] * (x % 5))),
    "zip": zipped,
    "route": routed,
    "unordered": lambda node: node.then(lambda x: x, workers=3, ordered=False),
    "stateful": lambda node: node.then(Counts()),
}


def graph(between):
    made = pg.Graph("g")
    between(made.add(ops.FromSequence(list(range(SAMPLES)), shuffle=False))).then(ops.Batch(4))
    return made


def delivered(batches):
    return [int(x) for batch in batches for x in batch]


def saved(between, ranks):
    """What ``ranks`` ranks deliver in three steps, and their states."""
    found, states = [], []
    for rank in range(ranks):
        with graph(between).loader(rank=rank, world_size=ranks, equal_steps=False) as loader:
            passing = iter(loader)
            found += delivered(itertools.islice(passing, 3))
            states.append(json.loads(json.dumps(loader.state_dict())))
    return found, states


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (3, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("name", [*ELASTIC, *WHOLE_PARTS])
def test_all_ranks_states_lose_and_double_nothing_at_another_size(name, sizes):
    between = {**ELASTIC, **WHOLE_PARTS}[name]
    with graph(between).loader() as loader:
        whole = collections.Counter(delivered(loader))
    found, states = saved(between, sizes[0])
    for rank in range(sizes[1]):
        with graph(between).loader(rank=rank, world_size=sizes[1], equal_steps=False) as loader:
            loader.load_state_dict(states)
            found += delivered(loader)
    assert collections.Counter(found) == whole


@pytest.mark.parametrize("name", WHOLE_PARTS)
def test_parts_that_would_leave_ranks_with_unequal_steps_are_refused_with_the_stage_in_the_way(name):
    between = WHOLE_PARTS[name]
    _, states = saved(between, 2)
    with graph(between).loader(rank=0, world_size=3, equal_steps=True) as loader:
        with pytest.raises(StateError, match="behind stage '|because of stages '"):
            loader.load_state_dict(states)
        with pytest.raises(StateError, match="because of stages '"):
            loader.load_state_dict(states[0])
