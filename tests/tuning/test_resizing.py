"""Workers come and go, and queues change their length, while passes run: what is delivered stays the same."""

import itertools
import json
import threading

import pytest
from gates import Gate
from hypothesis import given, strategies as st
from random_graphs.recipes import recipes
from random_graphs.resizing import resized_loader

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import Operator
from pipegraph.engine.activity import Activity
from pipegraph.profile.search import Tuning
from pipegraph.testing.outcome import DeliveredChunk, assert_equal_chunks, placed, run_pass
from tests.engine.test_fuzz import fast_switching as fast_switching, fuzzed, prefetch_of, start_deadline
from tests.engine.test_resume import CASES

pytestmark = pytest.mark.usefixtures("no_leaks")


def is_ordered(graph):
    return all(spec.ordered for spec in graph.stages.values())


def assert_same_outcomes(make, backend="thread", seed=0, epochs=2):
    with placed(make(), "inline", 1).loader(epochs=epochs) as loader:
        expected = [run_pass(loader) for _ in range(epochs)]
    with resized_loader(placed(make(), backend, 1), seed=seed, epochs=epochs) as loader:
        found = [run_pass(loader) for _ in range(epochs)]
    for one, other in zip(expected, found, strict=True):
        assert one.error == other.error
        assert_equal_chunks(one.chunks, other.chunks, is_ordered(make()), "sizes at random")


@pytest.mark.parametrize("name", sorted(CASES))
def test_outcomes_do_not_depend_on_random_sizes(name):
    for seed in range(3):
        assert_same_outcomes(CASES[name], seed=seed)


def add(x, rng):
    return x + int(rng.integers(1000))


def spread(x):
    return [x, -x][: 1 + x % 2]


def long_graph():
    graph = pg.Graph("long")
    node = graph.add(ops.FromSequence(range(300), order=pg.order.StridedOrder(shuffle=True)), name="read")
    node = node.then(add, name="add").then(ops.Filter(lambda x: x % 7 != 0), name="keep")
    node = node.then(ops.FlatMap(spread), name="spread").then(ops.Batch(3), name="batch")
    return node.then(lambda x: x * 2, name="double").graph


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_long_pass_does_not_depend_on_random_sizes(backend):
    assert_same_outcomes(long_graph, backend)


@fuzzed
@given(recipe=recipes(), turn=st.integers(0, 3), seed=st.integers(0, 999))
def test_random_graphs_with_random_sizes_deliver_what_the_inline_reference_delivers(recipe, turn, seed):
    start_deadline()
    epochs = 2

    def all_passes(loader):
        outcomes = []
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            outcomes.append(run_pass(loader))
        return outcomes

    prefetch = prefetch_of(recipe, epochs)
    with recipe.build(inline=True).loader(recipe.output, epochs=prefetch) as loader:
        expected = all_passes(loader)
    with resized_loader(recipe.build(turn=turn), recipe.output, seed=seed, epochs=prefetch) as loader:
        found = all_passes(loader)
    for one, other in zip(expected, found, strict=True):
        assert (one.error is None) == (other.error is None)
        if recipe.ordered:
            assert one.error == other.error
        if recipe.ordered or one.error is None:
            assert_equal_chunks(one.chunks, other.chunks, recipe.ordered, "sizes at random")


@pytest.mark.parametrize("stop", [1, 17, 60, 110])
def test_a_state_taken_between_resizes_resumes_exactly(stop):
    with long_graph().loader() as loader:
        whole = run_pass(loader).chunks
    with resized_loader(long_graph(), seed=stop) as loader:
        before = [DeliveredChunk.of(chunk) for chunk in itertools.islice(loader.chunks(), stop)]
        state = json.loads(json.dumps(loader.state_dict()))
    with resized_loader(long_graph(), seed=stop + 1) as loader:
        loader.load_state_dict(state)
        rest = run_pass(loader).chunks
    assert_equal_chunks(whole, (*before, *rest), True, "resumed")


class Ways(Operator):
    """Counts who is open; may wait or fail while opening."""

    def __init__(self):
        self.state = {"open": 0, "most": 0, "opened": 0, "closed": 0}
        self.lock = threading.Lock()
        self.fail_from = 99
        self.changed = threading.Condition(self.lock)

    def open(self, context):
        with self.changed:
            if context.worker >= self.fail_from:
                raise OSError("no more of these")
            self.state["open"] += 1
            self.state["opened"] += 1
            self.state["most"] = max(self.state["most"], self.state["open"])
            self.changed.notify_all()

    def close(self):
        with self.changed:
            self.state["open"] -= 1
            self.state["closed"] += 1
            self.changed.notify_all()

    def process(self, chunk):
        return chunk

    def wait_for(self, name, value):
        with self.changed:
            self.changed.wait_for(lambda: self.state[name] == value)


class Watch:
    """In place of the tuner: does nothing."""

    tuning = Tuning()

    def begins(self, loader, crew):
        self.crew = crew

    def asked(self, items):
        pass


def watched(graph, **options):
    loader = graph.loader(autotune=True, **options)
    watch = Watch()
    loader._observers = [watch]
    return loader, watch


def gated():
    graph, gate = pg.Graph("gated"), Gate()
    graph.add(ops.FromSequence(range(40)), name="read").then(gate, name="gate")
    return graph, gate


def test_workers_that_join_in_the_middle_of_a_pass_take_their_share():
    graph, gate = gated()
    loader, watch = watched(graph)
    with loader:
        items = iter(loader)
        assert gate.wait_until_waiting(1) == [0]
        watch.crew.resize("gate", 4)
        assert gate.wait_until_waiting(4) == [0, 1, 2, 3]
        gate.release_position(3, 2, 1)
        gate.wait_until_waiting(4)
        gate.release_all()
        assert list(range(40)) == list(items)
    assert loader.profile().stages["gate"].workers == 4


def test_a_worker_that_is_to_leave_finishes_its_item_and_closes_its_operator():
    ways, gate = Ways(), Gate()
    graph = pg.Graph("ways")
    node = graph.add(ops.FromSequence(range(40)), name="read").then(gate, name="gate")
    node.then(ways, name="ways")
    loader, watch = watched(graph)
    with loader:
        items = iter(loader)
        watch.crew.resize("ways", 3)
        ways.wait_for("open", 3)
        watch.crew.resize("gate", 3)
        gate.wait_until_waiting(3)
        watch.crew.resize("gate", 1)
        watch.crew.resize("ways", 1)
        assert watch.crew.count("gate") == 3  # nobody has left: each has an item in work
        gate.release_all()
        assert list(range(40)) == list(items)
        ways.wait_for("open", 1)
    assert ways.state["opened"] == ways.state["closed"] == 3


def test_stages_whose_order_or_state_needs_one_worker_are_not_resized():
    graph = pg.Graph("fixed")
    node = graph.add(ops.FromIterable(range(9)), name="read", workers="auto").then(ops.Shuffle(3), name="mix")
    node.then(ops.Batch(2), name="batch", workers="auto", capacity="auto")
    plan = graph.plan()
    assert plan.stages["read"].tuned == ()
    assert plan.stages["batch"].tuned == ("capacity",)
    assert "read: workers='auto' means 1 here" in str(plan)
    assert "can only be read in sequence" in str(plan)


def test_a_worker_that_joins_while_a_stall_is_looked_into_ends_the_stall():
    graph, _ = gated()
    loader, _ = watched(graph)
    with loader:
        iter(loader)
        run = loader._crew.run
        run.activity = Activity()  # of a run in which everybody waits
        look = run._grow_or_explain

        def look_while_a_worker_joins():
            found = look()
            run.activity.attach()
            run.activity.pause()
            return found

        run._grow_or_explain = look_while_a_worker_joins
        run._resolve()
        assert run.error is None
        run._grow_or_explain = look
        run._resolve()
        assert "the pipeline is stalled" in str(run.error)
