"""Random graphs, delays, failures and stop points: always the chunks of the inline reference, no hang, no leak."""

import faulthandler
import itertools
import json
import os
import sys
import threading
import warnings

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, given, settings, strategies as st
from lines import at_line
from random_graphs.recipes import Recipe, Step, recipes, row_recipes

from pipegraph.engine.stage import bundle_size as pace
from pipegraph.errors import LoaderClosedError, PipegraphWarning
from pipegraph.testing.outcome import DeliveredChunk, Outcome, assert_equal_chunks, run_pass, samples

EXAMPLES = int(os.environ.get("PIPEGRAPH_FUZZ_EXAMPLES", "30"))
DEADLINE_S = 1800
"""Of one example, which takes seconds: on a starved machine one that was alive took more than 300."""

fuzzed = settings(
    max_examples=EXAMPLES,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


CUT_SHORT = Recipe((Step("drawn", size=45), Step("take", ((0, 0),), 1)))
"""Random graphs that found faults, and one that would have."""


_pytests = {}


@pytest.fixture(autouse=True)
def fast_switching(pytestconfig):
    """Threads change places a hundred times as often as they would."""
    _pytests["stderr"] = pytestconfig.stash[fault_handler_stderr_fd_key]
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)
    faulthandler.cancel_dump_traceback_later()


def start_deadline():
    """A hang ends the run with the stacks of all threads, where pytest writes them: what it captures would be lost."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=_pytests["stderr"])


def prefetch_of(recipe, epochs):
    """In completion order a failure is raised at once, also one of the next epoch: that must not be under way."""
    return epochs if recipe.ordered or not recipe.fails else 1


def all_passes(graph, recipe, epochs, prefetch):
    with graph.loader(recipe.output, epochs=prefetch) as loader:
        outcomes = []
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            outcomes.append(run_pass(loader))
        return outcomes


def assert_same(expected: Outcome, found: Outcome, ordered: bool, what: str):
    if ordered:
        assert_equal_chunks(expected.chunks, found.chunks, True, what)
        assert expected.error == found.error, what
    elif expected.error is None:
        assert found.error is None, (what, found.error)
        assert_equal_chunks(expected.chunks, found.chunks, False, what)
    else:  # raised at once, wherever the others stand
        assert found.error is not None and found.error[0] == expected.error[0], (what, found.error)


@pytest.fixture
def long_bundles(monkeypatch):
    """Rows travel in bundles as long as they may be, however slow this machine is."""
    monkeypatch.setattr(pace, "BUNDLE_NS", 1 << 60)
    monkeypatch.setattr(pace, "LONG_NS", 1 << 61)


@fuzzed
@given(recipes(), st.integers(1, 3), st.sampled_from([1, 2, 3, None]), st.integers(0, 5))
def test_random_graphs_deliver_what_the_inline_reference_delivers(recipe, epochs, prefetch, turn):
    start_deadline()
    threads = set(threading.enumerate())
    prefetch = prefetch_of(recipe, prefetch)
    reference = all_passes(recipe.build(inline=True), recipe, epochs, prefetch)
    found = all_passes(recipe.build(turn=turn), recipe, epochs, prefetch)
    for epoch, (one, other) in enumerate(zip(reference, found, strict=True)):
        assert_same(one, other, recipe.ordered, f"epoch {epoch}")
    assert set(threading.enumerate()) <= threads


@fuzzed
@given(recipes(), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(0, 5))
def test_random_graphs_resume_exactly_wherever_they_are_stopped(recipe, stops, turn):
    check_resume(recipe, stops, turn)


@fuzzed
@given(recipes(failures=False), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(0, 5))
def test_iterables_with_states_resume_exactly(recipe, stops, turn):
    check_resume(recipe.streamed(), stops, turn)


@fuzzed
@given(recipes(failures=False), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(0, 5))
def test_samplers_with_generators_resume_exactly(recipe, stops, turn):
    check_resume(recipe.drawing(), stops, turn)


def test_an_epoch_cut_short_says_where_the_next_one_begins():
    check_resume(CUT_SHORT, [9], 1)


@fuzzed
@given(row_recipes(), st.lists(st.integers(0, 12), max_size=3), st.sampled_from([0, 3, 6]))
def test_rows_in_bundles_come_and_resume_as_they_do_one_by_one(long_bundles, recipe, stops, turn):
    check_resume(recipe, stops, turn)


def check_resume(recipe, stops, turn):
    start_deadline()
    recipe = recipe.without_budgets()
    threads = set(threading.enumerate())
    epochs = 2
    reference = all_passes(recipe.build(inline=True), recipe, epochs, 1)
    got = [[] for _ in range(epochs)]
    errors = [None] * epochs
    state = None
    for number, stop in enumerate([*stops, None]):
        inline = (turn + number) % 4 == 3
        with recipe.build(inline=inline, turn=turn + number).loader(
            recipe.output, epochs=prefetch_of(recipe, epochs)
        ) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(state))
            left = stop
            while loader.epoch < epochs and left != 0:
                epoch = loader.epoch
                outcome = run_pass(loader, left)
                got[epoch] += outcome.chunks
                errors[epoch] = outcome.error or errors[epoch]
                if left is not None:
                    between = turn % 2 and loader.epoch > epoch  # stop behind a whole epoch, too
                    left = 0 if between else left - len(outcome.chunks)
            state = json.dumps(loader.state_dict())
            assert state == json.dumps(json.loads(state))
    for epoch, expected in enumerate(reference):
        found = Outcome(tuple(got[epoch]), errors[epoch])
        assert_same(expected, found, recipe.ordered, f"epoch {epoch}, stopped after {stops}")
    assert set(threading.enumerate()) <= threads


@fuzzed
@given(recipes(), st.integers(0, 12), st.integers(0, 5))
def test_several_loaders_of_one_graph_deliver_as_if_each_were_alone(recipe, stop, turn):
    check_several(recipe, stop, turn)


def check_several(recipe, stop, turn):
    start_deadline()
    threads = set(threading.enumerate())
    recipe = recipe.without_budgets()
    expected = all_passes(recipe.build(inline=True), recipe, 2, 1)
    graph = recipe.build(turn=turn)
    beside = []
    thread = threading.Thread(target=lambda: beside.extend(all_passes(graph, recipe, 2, 1)))
    with graph.loader(recipe.output) as one, graph.loader(recipe.output) as other:
        passing = one.chunks()
        head, error = [], None
        thread.start()
        try:
            head = [DeliveredChunk.of(chunk) for chunk in itertools.islice(passing, stop)]
            state = json.dumps(one.state_dict())
            whole = [run_pass(other) for _ in range(2)]
            other.load_state_dict(json.loads(state))
            epoch = other.epoch  # the next one, where the first loader was through
            resumed = run_pass(other)
            other.close()
            tail = tuple(map(DeliveredChunk.of, passing))
        except Exception as failure:  # of the first loader's pass
            error = (type(failure).__name__, str(failure))
        if error is None:
            assert_same(expected[0], Outcome((*head, *tail)), recipe.ordered, "the loader that continued")
            together = Outcome((*(head if epoch == 0 else ()), *resumed.chunks), resumed.error)
            assert_same(expected[epoch], together, recipe.ordered, "the one that resumed")
            for epoch in range(2):
                assert_same(expected[epoch], whole[epoch], recipe.ordered, f"the other, epoch {epoch}")
        else:
            assert expected[0].error is not None, error
        thread.join(DEADLINE_S)
    for epoch in range(2):
        assert_same(expected[epoch], beside[epoch], recipe.ordered, f"the one in a thread, epoch {epoch}")
    assert set(threading.enumerate()) <= threads


# -- the life of a loader ---------------------------------------------------------------------------


ACTIONS = st.one_of(
    st.tuples(st.just("go_through"), st.none() | st.integers(0, 6)),
    st.tuples(st.just("begin"), st.integers(1, 2)),
    st.tuples(st.just("choose"), st.integers(0, 2)),
    st.tuples(st.just("choose_inside"), st.integers(0, 2)),
    st.tuples(st.just("save"), st.none()),
    st.tuples(st.just("restore"), st.integers(0, 3)),
    st.tuples(st.just("open_anew"), st.integers(0, 5)),
    st.tuples(st.just("interrupt"), st.integers(1, 900)),
    st.tuples(st.just("close_from_elsewhere"), st.integers(0, 3)),
)


class Left:
    """What is left of an epoch: chunks in order, or samples in none."""

    def __init__(self, epoch, chunks, ordered):
        self.epoch, self.ordered = epoch, ordered
        self.content = chunks if ordered else samples(chunks)

    def without(self, chunks):
        """What is left after these, which must come next."""
        rest = Left(self.epoch, (), self.ordered)
        if self.ordered:
            assert_equal_chunks(self.content[: len(chunks)], chunks, True, f"epoch {self.epoch}")
            rest.content = self.content[len(chunks) :]
        else:
            more = samples(chunks)
            assert more <= self.content, (self.epoch, more - self.content)
            rest.content = self.content - more
        return rest

    def ends_with(self, rest):
        """Whether a state from somewhere in here continues with ``rest``."""
        if self.ordered:
            return rest.content == self.content[len(self.content) - len(rest.content) :]
        return rest.content <= self.content


class Life:
    """A loader and what it should do, side by side."""

    def __init__(self, recipe, prefetch, turn):
        self.recipe, self.prefetch = recipe, prefetch
        self.reference = recipe.build(inline=True).loader(recipe.output)
        self.epochs = {}
        self.saved = []
        self.loader = None
        self.open_anew(turn)

    def whole(self, epoch):
        if epoch not in self.epochs:
            self.reference.set_epoch(epoch)
            self.epochs[epoch] = run_pass(self.reference).chunks
        return Left(epoch, self.epochs[epoch], self.recipe.ordered)

    def new_loader(self, turn):
        return self.recipe.build(turn=turn).loader(self.recipe.output, epochs=self.prefetch)

    def open_anew(self, turn):
        self.close()
        self.turn = turn
        self.loader = self.new_loader(turn)
        self.rests_at(self.whole(0))

    def close(self):
        if self.loader is not None:
            self.loader.close()

    def rests_at(self, left, restored=False):
        self.state = self.next = left  # what a state describes, and what the next pass delivers
        self.restored = restored

    def went_through(self, chunks, ended):
        left = self.next.without(chunks)
        if ended:
            assert not left.content, f"epoch {left.epoch} ended early: {left.content}"
            self.rests_at(self.whole(left.epoch + 1))
        elif chunks:
            self.state, self.next, self.restored = left, self.whole(left.epoch + 1), False
        else:
            self.state = self.next

    def go_through(self, most):
        outcome = run_pass(self.loader, most)
        assert outcome.error is None, outcome.error
        self.went_through(outcome.chunks, most is None or len(outcome.chunks) < most)

    def begin(self, times):
        for _ in range(times):
            iter(self.loader)
        self.state = self.next

    def choose(self, epoch):
        drops = self.restored and epoch != self.next.epoch
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.loader.set_epoch(epoch)
        assert [each.category for each in told] == [PipegraphWarning] * drops
        if epoch != self.next.epoch:
            self.rests_at(self.whole(epoch))

    def choose_inside(self, epoch):
        running = self.next.epoch
        passing = self.loader.chunks()
        chunks = tuple(DeliveredChunk.of(chunk) for chunk in itertools.islice(passing, 2))
        if len(chunks) < 2:
            self.went_through(chunks, True)
            self.choose(epoch)
            return
        self.loader.set_epoch(epoch)
        del passing
        self.went_through(chunks, False)
        if epoch != running:
            self.next = self.whole(epoch)

    def save(self, _):
        self.saved.append((json.dumps(self.loader.state_dict()), self.state))

    def restore(self, number):
        if self.saved:
            state, left = self.saved[number % len(self.saved)]
            self.loader.load_state_dict(json.loads(state))
            self.rests_at(left, restored=True)

    def interrupt(self, line):
        """A state taken before any line of the engine in this thread, as by a signal handler."""
        states, outcomes, before, started = [], [], self.state, self.next
        at_line(
            line,
            lambda: states.append(self.loader.state_dict()),
            lambda: outcomes.append(run_pass(self.loader, 3)),
        )
        (outcome,) = outcomes
        assert outcome.error is None, outcome.error
        self.went_through(outcome.chunks, len(outcome.chunks) < 3)
        for state in states:
            with self.new_loader(self.turn + 1) as other:
                other.load_state_dict(json.loads(json.dumps(state)))
                epoch = other.epoch
                rest = Left(epoch, run_pass(other).chunks, self.recipe.ordered)
            after = self.whole(started.epoch + 1)
            assert any(epoch == each.epoch and each.ends_with(rest) for each in (before, started, after)), (
                epoch,
                rest.content,
            )

    def close_from_elsewhere(self, stop):
        closer = threading.Thread(target=self.loader.close)
        closer.start()
        try:
            for _ in itertools.islice(self.loader.chunks(), stop):
                pass
        except LoaderClosedError:
            pass
        closer.join(DEADLINE_S)
        assert not closer.is_alive()
        self.open_anew(self.turn)


@fuzzed
@given(
    recipes(failures=False),
    st.lists(ACTIONS, min_size=1, max_size=9),
    st.sampled_from([1, 2, None]),
    st.integers(0, 5),
)
def test_a_loader_lives_as_its_model_does(recipe, actions, prefetch, turn):
    start_deadline()
    threads = set(threading.enumerate())
    life = Life(recipe, prefetch, turn)
    try:
        for action, argument in actions:
            getattr(life, action)(argument)
            assert life.loader.epoch == life.next.epoch, (action, argument)
        life.save(None)
        life.go_through(None)
    finally:
        life.close()
        life.reference.close()
    assert set(threading.enumerate()) <= threads
