"""Errors of the methods with which users' operators, sources and samplers are begun, asked and ended: they arrive,
with their stage's name, wherever the stage runs; and StopIteration does not end a loop in silence."""

from collections import deque

import pytest

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.usefixtures("no_leaks")

PLACES = {
    "thread": {},
    "inline": {"backend": "inline"},
    "process": {"backend": "process"},
}


class Refuses:
    """Raises an error in one of its methods."""

    def __init__(self, method, error):
        self.method, self.error = method, error

    def at(self, method):
        if method == self.method:
            raise self.error("mine")


class Positions(Refuses, pg.Source):
    random_access = True

    def open(self, context):
        self.at("open")

    def begin_run(self, epoch, history):
        self.at("begin_run")

    def length(self, epoch, rank, world_size):
        return 8

    def positions(self, epoch, rank, world_size, start):
        self.at("positions")
        return iter(range(start, 8))

    def read(self, position, epoch):
        return position


class Items(Positions):
    random_access = False

    def iterate(self, epoch, rank, world_size, start):
        self.at("iterate")
        return ((n, n) for n in range(start, 8))


class Stateful(Refuses):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(range(8))

    def state_dict(self):
        self.at("state_dict")
        return {}

    def load_state_dict(self, state):
        pass


class Opens(Refuses, pg.Operator):
    def open(self, context):
        self.at("open")

    def process(self, chunk):
        return chunk


class Flushes(Refuses, pg.Regroup):
    def begin(self):
        self.at("begin")

    def process(self, chunk):
        return (chunk,)

    def flush(self):
        self.at("flush")
        return ()


class Keeps(Refuses, pg.Operator):
    stateful = True

    def process(self, chunk):
        return chunk

    def state_dict(self):
        self.at("state_dict")
        return {}

    def load_state_dict(self, state):
        pass


HOOKS = [
    *((Positions, each) for each in ("open", "begin_run", "positions")),
    *((Items, each) for each in ("open", "begin_run", "iterate")),
    *((Opens, each) for each in ("open",)),
    *((Flushes, each) for each in ("begin", "flush")),
    (Keeps, "state_dict"),
    ("iterable", "state_dict"),
]


def loader_of(made, method, error, place):
    graph, where = pg.Graph("g", seed=1), PLACES[place]
    if made == "sampler":
        graph.add(ops.FromSequence(range(8), sampler=Stateful(method, error)), name="work", **where)
    elif made == "iterable":
        graph.add(ops.FromIterable(Stateful(method, error)), name="work", **where)
    elif issubclass(made, pg.Source):
        graph.add(made(method, error), name="work", **where).then(ops.Batch(2), name="batch")
    else:
        source = graph.add(ops.FromSequence(range(70)), name="src")
        source.then(made(method, error), name="work", **where)
    return graph.loader()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("made", "method"), HOOKS, ids=lambda each: getattr(each, "__name__", each))
def test_an_error_of_a_hook_arrives_and_names_its_stage(made, method, place):
    with (
        loader_of(made, method, ValueError, place) as loader,
        pytest.raises(ValueError, match="mine") as caught,
    ):
        deque(iter(loader), maxlen=0)
    assert "stage 'work'" in "".join(caught.value.__notes__)
    assert "'batch'" not in "".join(caught.value.__notes__)
