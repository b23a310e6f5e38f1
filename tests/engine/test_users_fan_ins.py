"""Fan-ins and routes of a user's own: right ones resume exactly however they are written, and wrong ones are found."""

import itertools

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError
from pipegraph.testing import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("no_leaks")


class InTurn(pg.FanIn):
    """One item of each input in turn, until all have ended."""

    def begin(self, inputs, epoch):
        self.inputs, self.at, self.ended = inputs, 0, set()

    def next_input(self):
        if len(self.ended) == self.inputs:
            return None
        while self.at in self.ended:
            self.at = (self.at + 1) % self.inputs
        return self.at

    def end_input(self, index):
        self.ended.add(index)

    def process(self, chunk):
        self.at = (self.at + 1) % self.inputs
        return chunk

    def cursor(self, positions):
        return (*positions, self.at)

    def cursors(self, cursor, inputs):
        self.at = cursor[-1]
        return list(cursor[:-1])


class Runs(InTurn):
    """Three items of each input, and keeps its counts in a list that ``begin`` empties."""

    def __init__(self):
        self.counts = [0, 0]

    def begin(self, inputs, epoch):
        super().begin(inputs, epoch)
        self.counts[:] = [0] * inputs

    def process(self, chunk):
        self.counts[self.at] += 1
        if self.counts[self.at] % 3 == 0:
            self.at = (self.at + 1) % self.inputs
        return chunk

    def cursor(self, positions):
        return (*positions, self.at, tuple(self.counts))

    def cursors(self, cursor, inputs):
        *positions, self.at, counts = cursor
        self.counts[:] = counts
        return positions


class Pairs(InTurn):
    """One output for an item of each input; ends with the shortest."""

    def begin(self, inputs, epoch):
        super().begin(inputs, epoch)
        self.held = []

    def next_input(self):
        return None if self.ended else len(self.held)

    def process(self, chunk):
        self.held.append(chunk)
        if len(self.held) < self.inputs:
            return None
        pair, self.held = self.held, []
        return pg.Chunk.group(pair, tuple(each.data for each in pair), batched=False)

    def cursor(self, positions):
        return tuple(positions)

    def cursors(self, cursor, inputs):
        return list(cursor)


RIGHT = [InTurn, Runs, Pairs]


def plain(join):
    def make():
        graph = pg.Graph("own")
        one, other = (graph.add(ops.FromSequence(range(n)), name=f"to-{n}") for n in (7, 11))
        graph.add(join(), one, other, name="join")
        return graph

    return make


def behind_a_route(join):
    def make():
        graph = pg.Graph("own")
        routed = graph.add(ops.FromIterable(range(20))).then(ops.Route(lambda x: x * x % 3 % 2, 2))
        graph.add(join(), routed[0], routed[1], name="join")
        return graph

    return make


@pytest.mark.parametrize("join", RIGHT)
@pytest.mark.parametrize("around", [plain, behind_a_route])
def test_a_users_fan_in_resumes_exactly_however_it_is_written(join, around):
    assert_resumes_exactly(around(join))


@pytest.mark.parametrize("wrong", [0, -1, 2, 0.5])
def test_an_input_that_has_ended_or_is_none_is_the_stages_error_and_no_stall(wrong):
    class Stays(InTurn):
        def next_input(self):
            return wrong if 0 in self.ended else super().next_input()

    with plain(Stays)().loader() as loader, pytest.raises(GraphError, match=rf"stage 'join': .*got {wrong}"):
        list(loader)


# -- routes ------------------------------------------------------------------------------------------


class Choosing(pg.FanOut):
    outputs = 2


class ByPosition(Choosing):
    def choose(self, chunk):
        return int(chunk.positions[0]) % 2


class ByDraw(Choosing):
    """The draw is the sample's own."""

    def choose(self, chunk):
        return int(torch.randint(2, ()))


class BySharedBlocks(Choosing):
    """Its copies count together."""

    def __init__(self):
        self.seen = itertools.count()

    def choose(self, chunk):
        return next(self.seen) // 4 % 2


def routed(route, items=range(40)):
    def make():
        graph = pg.Graph("own")
        ways = graph.add(ops.FromIterable(items), name="source").then(route(), name="route")
        graph.add(ops.Merge(), ways[0].then(lambda x: x), ways[1])
        return graph

    return make


@pytest.mark.parametrize("route", [ByPosition, ByDraw])
def test_a_users_route_that_goes_by_its_chunk_resumes_exactly(route):
    assert_resumes_exactly(routed(route, range(12)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (BySharedBlocks, "a route has no state: .*an operator with a state above it"),
        (InTurn, r"a fan-in keeps its state in its cursor: .*cursors\(\)"),
    ],
)
def test_a_route_or_fan_in_with_a_state_is_told_the_way_that_resumes(kind, text):
    class WithState(kind):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    graph = pg.Graph("own")
    source = graph.add(ops.FromIterable(range(3)))
    graph.add(WithState(), *[source] * (2 if kind is InTurn else 1), name="own")
    with pytest.raises(GraphError, match=f"stage 'own': .*{text}"):
        graph.plan("own")
