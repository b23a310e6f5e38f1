"""Exact resume of every operator, and of one graph that holds them all: saved at every step, through JSON, twice."""

import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from gates import Gate
from random_graphs.stage_functions import RunningSum, several

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.loader.digests import digests
from pipegraph.order import StridedOrder
from pipegraph.testing import assert_resumes_exactly, assert_same_everywhere

pytestmark = pytest.mark.usefixtures("no_leaks")

Point = namedtuple("Point", "x y")


def noisy(x, rng):
    return x + int(rng.integers(1000))


def to_array(i):
    return {"key": f"k{i}", "x": np.full(i % 4 + 1, i), "t": torch.tensor([i])}


class CountedIterator:
    """An iterator that can resume from its own state."""

    def __init__(self, most):
        self.at, self.most = 0, most

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.most:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Pairs(pg.Regroup):
    """A user's own regrouping operator: two by two, the rest dropped."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.one = None

    def process(self, chunk):
        if self.one is None:
            self.one = chunk
            return []
        first, self.one = self.one, None
        return [pg.Chunk.group([first, chunk], (first.data, chunk.data), batched=False)]

    def flush(self):
        self.one = None
        return []


class StatefulPairs(pg.Regroup):
    """A regrouping operator with a state of its own: running totals of two and two."""

    def __init__(self):
        self.total, self.held = 0, []

    def process(self, chunk):
        self.total += chunk.data
        self.held.append(chunk)
        if len(self.held) < 2:
            return []
        held, self.held = self.held, []
        return [pg.Chunk.group(held, self.total, batched=False)]

    def flush(self):
        held, self.held = self.held, []
        return [pg.Chunk.group(held, self.total, batched=False)] if held else []

    def state_dict(self):
        return {"total": self.total, "held": self.held}

    def load_state_dict(self, state):
        self.total, self.held = state["total"], state["held"]


class Alternate(pg.FanIn):
    """A user's own fan-in: in turn, until any ends."""

    def begin(self, inputs, epoch):
        self.inputs, self.at, self.over = inputs, 0, False

    def next_input(self):
        return None if self.over else self.at

    def end_input(self, index):
        self.over = True

    def process(self, chunk):
        self.at = (self.at + 1) % self.inputs
        return chunk

    def cursor(self, positions):
        return (tuple(positions), self.at)

    def cursors(self, cursor, inputs):
        self.at = cursor[1]
        return list(cursor[0])


def numbers(n=8):
    return ops.FromIterable(range(n))


def sequence(n=8, **options):
    return ops.FromSequence(list(range(n)), **options)


def chain(source, *operators, **options):
    def make():
        graph = pg.Graph("chain", seed=3)
        node = graph.add(source())
        for operator in operators:
            node = node.then(operator(), **options)
        return graph

    return make


def fan_in(join, *branches, source=numbers):
    def make():
        graph = pg.Graph("fan-in", seed=3)
        root = graph.add(source())
        ends = []
        for branch in branches:
            node = root
            for operator in branch:
                node = node.then(operator())
            ends.append(node)
        graph.add(join(), *ends)
        return graph

    return make


def routed(*branches, outputs=2, choose=lambda x: x // 2):
    def make():
        graph = pg.Graph("routed", seed=3)
        route = graph.add(numbers(10)).then(ops.Route(lambda x: choose(x) % outputs, outputs))
        ends = []
        for output, branch in enumerate(branches):
            node = route[output]
            for operator in branch:
                node = node.then(operator())
            ends.append(node)
        graph.add(ops.Merge(), *ends).then(ops.Map(lambda x: x))
        return graph

    return make


def batch(size=3, **options):
    return lambda: ops.Batch(size, collate=list, **options)


def bucket():
    return ops.Bucket(lambda x: x % 3 if isinstance(x, int) else len(x), [1, 2], size=2)


def flat():
    return ops.FlatMap(lambda x: several(x, 3))


def plus():
    return ops.Map(lambda x: x + 1)


def nested():
    """A route inside a branch of a route, with windows on the way."""
    graph = pg.Graph("nested", seed=3)
    outer = graph.add(numbers(14)).then(ops.Route(lambda x: x // 3 % 2, 2), name="outer")
    inner = outer[0].then(plus()).then(ops.Route(lambda x: x % 2, 2), name="inner")
    joined = graph.add(ops.Merge(), inner[0].then(ops.Shuffle(3)), inner[1].then(flat()), name="inner-merge")
    graph.add(ops.Merge(), joined, outer[1].then(RunningSum()).then(lambda t: t[0]), name="outer-merge")
    return graph


def side_branch():
    """A branch of a route that is also read from outside of its merge."""
    graph = pg.Graph("side", seed=3)
    route = graph.add(numbers(9)).then(ops.Route(lambda x: x % 2, 2))
    even = route[0].then(plus(), name="even")
    merged = graph.add(ops.Merge(), even.then(ops.Shuffle(2)), route[1])
    graph.add(ops.Zip(), merged, even.then(ops.Shuffle(3)))
    return graph


def everything():
    """One graph that holds every operator of the engine."""
    graph = pg.Graph("everything", seed=3)
    ints = graph.add(ops.FromIterable(range(12)), name="ints")
    shuffled = graph.add(
        ops.FromSequence(list(range(7)), order=StridedOrder(shuffle=True)), name="shuffled", workers=3
    )
    mixed = graph.add(ops.Mix([2, 1], stop="all"), ints, shuffled, name="mixed")
    random = mixed.then(noisy, name="noisy", workers=3)
    kept = random.then(ops.Filter(lambda x: x % 5), name="kept", workers=2)
    children = kept.then(flat(), name="children", workers=2)
    route = children.then(ops.Route(lambda x: x % 3, 3), name="route")
    merged = graph.add(
        ops.Merge(),
        route[0].then(ops.Shuffle(4), name="window"),
        route[1].then(plus(), name="plus", workers=2),
        route[2].then(bucket(), name="bucket"),
        name="merge",
    )
    batches = merged.then(batch(4)(), name="batches").then(lambda b: [x + 1 for x in b], name="on-batches")
    singles = batches.then(ops.Unbatch(), name="singles", workers=2)
    sums = singles.then(RunningSum(), name="sums").then(lambda pair: pair[0], name="first")
    pairs = graph.add(ops.Zip(), sums, shuffled, name="zip")
    both = graph.add(ops.Concat(), pairs.then(lambda p: sum(p), name="sum"), ints, name="concat")
    alternating = graph.add(Alternate(), both, kept, name="alternate")
    alternating.then(Pairs(), name="pairs").then(sum, name="total").then(StatefulPairs(), name="totals")
    return graph


CASES = {  # the first and the last are run by make test, and two between them
    "Mix": fan_in(lambda: ops.Mix([1, 2]), [], [flat]),
    "FromIterable": chain(numbers),
    "FromIterable of a callable": chain(lambda: ops.FromIterable(lambda epoch: range(epoch, epoch + 7))),
    "FromIterable of a generator": chain(lambda: ops.FromIterable(lambda: (x * x for x in range(7)))),
    "FromSequence": chain(sequence),
    "FromSequence shuffled": chain(lambda: sequence(order=StridedOrder(shuffle=True))),
    "FromSequence of a sampler": chain(lambda: sequence(sampler=[3, 1, 4, 1, 5])),
    "Map": chain(numbers, plus),
    "Map with rng": chain(numbers, lambda: noisy),
    "Filter": chain(numbers, lambda: ops.Filter(lambda x: x % 3)),
    "FlatMap": chain(numbers, flat),
    "FlatMap of FlatMap": chain(numbers, flat, flat),
    "Batch": chain(numbers, batch()),
    "Batch drop_last": chain(numbers, batch(drop_last=True)),
    "Batch by cost": chain(numbers, lambda: ops.Batch(cost=lambda x: x % 4, limit=5)),
    "Batch global_size": chain(numbers, lambda: ops.Batch(global_size=4)),
    "Batch of arrays": chain(numbers, lambda: to_array, lambda: ops.Batch(3, pad=-1)),
    "Batch of named tuples": chain(numbers, lambda: lambda i: Point(i, float(i)), lambda: ops.Batch(3)),
    "Unbatch": chain(numbers, batch(), ops.Unbatch),
    "Unbatch of arrays": chain(numbers, lambda: to_array, lambda: ops.Batch(3, pad=0), ops.Unbatch),
    "Batch after FlatMap": chain(numbers, flat, batch(4)),
    "Shuffle": chain(numbers, lambda: ops.Shuffle(4)),
    "Shuffle of Shuffle": chain(numbers, lambda: ops.Shuffle(3), lambda: ops.Shuffle(4)),
    "Shuffle of batches": chain(numbers, batch(2), lambda: ops.Shuffle(3)),
    "Bucket": chain(numbers, bucket),
    "Bucket and Batch": chain(numbers, bucket, batch(2)),
    "Bucket after Shuffle": chain(numbers, lambda: ops.Shuffle(5), bucket),
    "a stateful operator": chain(lambda: numbers(70), RunningSum),
    "a stateful operator behind a filter": chain(numbers, lambda: ops.Filter(lambda x: x % 3), RunningSum),
    "a user's regrouping operator": chain(numbers, Pairs),
    "a stateful regrouping operator": chain(numbers, StatefulPairs),
    "Zip": fan_in(ops.Zip, [], [plus]),
    "Zip of branches at other rates": fan_in(ops.Zip, [], [batch()]),
    "Concat": fan_in(ops.Concat, [], [plus]),
    "Concat of one node twice": fan_in(ops.Concat, [], []),
    "Mix until all have ended": fan_in(
        lambda: ops.Mix([3, 1], stop="all"), [], [lambda: ops.Filter(lambda x: x > 6)]
    ),
    "Mix of windows": fan_in(lambda: ops.Mix([1, 1], stop="all"), [lambda: ops.Shuffle(3)], [bucket]),
    "a user's fan-in": fan_in(Alternate, [], [flat]),
    "Route and Merge": routed([], []),
    "Route and Merge with a function": routed([plus], []),
    "Route and Merge with children": routed([flat], [plus]),
    "Route and Merge with a filter": routed([lambda: ops.Filter(lambda x: x % 3)], [plus]),
    "Route and Merge with windows": routed([lambda: ops.Shuffle(3)], [bucket]),
    "Route and Merge with batches": routed([batch(3)], [batch(2)]),
    "Route and Merge with a state": routed([RunningSum], []),
    "Route and Merge three ways": routed(
        [], [lambda: ops.Shuffle(2)], [flat], outputs=3, choose=lambda x: x * x
    ),
    "Route and Merge with an idle branch": routed([batch(2)], [plus], choose=lambda x: 0),
    "nested routes": nested,
    "a side branch": side_branch,
    "everything": everything,
}


@pytest.mark.parametrize("name", CASES)
def test_resumes_exactly(name):
    assert_resumes_exactly(CASES[name], epochs=2)


@pytest.mark.parametrize("name", CASES)
def test_is_the_same_with_any_workers_and_queues(name):
    assert_same_everywhere(CASES[name], workers=(1, 4), capacities=(None, 1))


def loose(make):
    """The same graph with every function running in completion order."""

    def changed():
        from dataclasses import replace

        graph = make()
        for name, spec in graph.stages.items():
            if isinstance(spec.operator, ops.Map | ops.FlatMap | ops.Filter | ops.Unbatch):
                graph.stages[name] = replace(spec, ordered=False, workers=3)
        return graph

    return changed


LOOSE = {
    name: loose(make)
    for name, make in {
        "Map": chain(numbers, plus),
        "Map behind Map": chain(numbers, plus, plus),
        "Filter": chain(numbers, lambda: ops.Filter(lambda x: x % 3), plus),
        "FlatMap": chain(numbers, flat, plus),
        "Batch": chain(numbers, plus, batch()),
        "Batch and Unbatch": chain(numbers, plus, batch(), ops.Unbatch),
        "Batch above": chain(numbers, batch(), ops.Unbatch),
        "Shuffle": chain(numbers, plus, lambda: ops.Shuffle(4)),
        "Bucket": chain(numbers, plus, bucket),
        "Concat": fan_in(ops.Concat, [plus], [plus]),
        "Concat above": chain(numbers, plus),
        "Mix": fan_in(lambda: ops.Mix([1, 1], stop="all"), [plus], []),
        "Route and Merge": routed([plus], [plus]),
        "Route and Merge with windows": routed([plus, lambda: ops.Shuffle(3)], [plus]),
        "Route and Merge with an idle branch": routed([plus], [plus], choose=lambda x: x // 7),
        "nested routes": nested,
    }.items()
}


@pytest.mark.parametrize("name", LOOSE)
def test_below_completion_order_stages_every_sample_is_delivered_once(name):
    assert_resumes_exactly(LOOSE[name], epochs=2)


def test_a_sample_that_comes_back_by_another_output_of_a_route_is_not_delivered_again():
    def made(workers):
        gate, graph = Gate(), pg.Graph("routed batches")
        loose = graph.add(ops.FromIterable(range(8))).then(gate, workers=workers, ordered=False)
        route = loose.then(ops.Batch(2, collate=list)).then(ops.Route(lambda batch: max(batch) % 2, 2))
        graph.add(ops.Merge(), route[0], route[1])
        return graph.loader(), gate

    first, gate = made(4)
    with first:
        passing = iter(first)
        gate.wait_until_waiting(4)
        gate.release_position(1, 2)
        came = next(passing)
        state = first.state_dict()
    assert sorted(came) == [1, 2]
    again, gate = made(1)
    gate.release_all()
    with again:
        again.load_state_dict(state)
        rest = [x for batch in again for x in batch]
    assert sorted(rest) == [0, 3, 4, 5, 6, 7]


def test_an_iterator_with_a_state_resumes_from_it():
    def make():
        graph = pg.Graph("g")
        graph.add(ops.FromIterable(lambda: CountedIterator(150)))
        return graph

    with make().loader() as loader:
        for _, _ in zip(range(100), loader, strict=False):
            state = loader.state_dict()

    class Unread(CountedIterator):
        started = []

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.started.append(self.at)

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(lambda: Unread(150)))
    with graph.loader() as loader:
        loader.load_state_dict({**state, "digest": digests(graph.plan())})
        assert list(loader) == list(range(100, 150))
    assert len(Unread.started) == 1 and Unread.started[0] > 0


class HeavyState(CountedIterator):
    """An iterator whose state is large: each snapshot of it is an object that is counted."""

    alive = weakref.WeakSet()

    def state_dict(self):
        made = HeavyPosition({"at": self.at})
        self.alive.add(made)
        return made


class HeavyPosition(dict):
    __hash__ = object.__hash__

    def __deepcopy__(self, memo):
        made = HeavyPosition(self)
        HeavyState.alive.add(made)
        return made


def test_an_iterator_with_a_state_resumes_exactly_at_every_step():
    def make():
        graph = pg.Graph("g")
        graph.add(ops.FromIterable(lambda: CountedIterator(9)))
        return graph

    assert_resumes_exactly(make)
    assert_resumes_exactly(make, rank=1, world_size=2, equal_steps=False)


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 2, "equal_steps": False}])
def test_snapshots_of_an_iterator_resume_exactly_at_every_step(monkeypatch, options):
    monkeypatch.setattr("pipegraph.engine.kinds.source.SNAPSHOT_EVERY", 2)

    def make():
        graph = pg.Graph("g")
        graph.add(ops.FromIterable(lambda: CountedIterator(11))).then(ops.Shuffle(3))
        return graph

    assert_resumes_exactly(make, epochs=3, **options)
