"""Random graphs, delays, failures and stop points: always the chunks of the inline reference, no hang, no leak."""

import faulthandler
import json
import os
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipegraph.stage import pace
from pipegraph.testing.graphs import recipes, row_recipes
from pipegraph.testing.outcome import Outcome, assert_equal_chunks, run_pass

EXAMPLES = int(os.environ.get("PIPEGRAPH_FUZZ_EXAMPLES", "200"))
DEADLINE_S = 60

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    derandomize=os.environ.get("PIPEGRAPH_FUZZ_EXAMPLES") is None,
)


@pytest.fixture(autouse=True)
def fast_switching():
    """Threads change places a hundred times as often as they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)
    faulthandler.cancel_dump_traceback_later()


def start_deadline():
    """A hang ends the run with the stacks of all threads."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=sys.__stderr__)


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
    threads = threading.active_count()
    prefetch = prefetch_of(recipe, prefetch)
    reference = all_passes(recipe.build(inline=True), recipe, epochs, prefetch)
    found = all_passes(recipe.build(turn=turn), recipe, epochs, prefetch)
    for epoch, (one, other) in enumerate(zip(reference, found, strict=True)):
        assert_same(one, other, recipe.ordered, f"epoch {epoch}")
    assert threading.active_count() == threads


@fuzzed
@given(recipes(), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(0, 5))
def test_random_graphs_resume_exactly_wherever_they_are_stopped(recipe, stops, turn):
    check_resume(recipe, stops, turn)


@fuzzed
@given(row_recipes(), st.lists(st.integers(0, 12), max_size=3), st.sampled_from([0, 3, 6]))
def test_rows_in_bundles_come_and_resume_as_they_do_one_by_one(long_bundles, recipe, stops, turn):
    check_resume(recipe, stops, turn)


def check_resume(recipe, stops, turn):
    start_deadline()
    threads = threading.active_count()
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
                    left -= len(outcome.chunks)
            state = json.dumps(loader.state_dict())
            assert state == json.dumps(json.loads(state))
    for epoch, expected in enumerate(reference):
        found = Outcome(tuple(got[epoch]), errors[epoch])
        assert_same(expected, found, recipe.ordered, f"epoch {epoch}, stopped after {stops}")
    assert threading.active_count() == threads
