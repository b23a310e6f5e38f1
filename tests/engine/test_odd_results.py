"""What operators and orders of users give back is counted and compared: nothing hangs, nothing is lost or doubled."""

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.capabilities import BundleMap
from pipegraph.chunk import Chunk, Failure
from pipegraph.engine.contents import Contents
from pipegraph.errors import GraphError


class Windows(pg.Regroup):
    """Overlapping groups without a state: no restart makes them again."""

    def begin(self):
        self.held = []

    def process(self, chunk):
        self.held.append(chunk)
        if len(self.held) < 3:
            return ()
        group, self.held = self.held, self.held[-1:]
        return [pg.Chunk.group(group, [each.data for each in group])]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_overlapping_groups_without_a_state_are_refused_wherever_they_are_made(backend):
    graph = pg.Graph("windows")
    graph.add(ops.FromSequence(range(12))).then(Windows(), name="windows", backend=backend)
    with graph.loader() as loader, pytest.raises(GraphError, match="stage 'windows'.*state"):
        list(loader)


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_an_expanding_operator_that_gives_one_chunk_twice_is_refused(backend):
    class Twice(pg.Operator):
        kind = "expand"
        one_to_one = False

        def process(self, chunk):
            child = chunk.child(0, chunk.data)
            return [child, child]

    graph = pg.Graph("twice")
    graph.add(ops.FromSequence(range(10))).then(Twice(), name="twice", backend=backend)
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="stage 'twice': process gave one chunk twice"),
    ):
        list(loader)


class Drawing(pg.order.Order):
    """Draws what it is told to."""

    def __init__(self, drawn):
        self.drawn = drawn

    def config(self):
        return {"order": "drawing"}

    def draw(self, layout, positions, seed, epoch):
        return self.drawn


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (np.zeros(1, np.int64), r"one sample for each position \(shape \(5,\)\), got int64 of shape \(1,\)"),
        (np.zeros(9, np.int64), r"got int64 of shape \(9,\)"),
        (np.zeros(5), r"an array of integers .*, got float64"),
        ([0, 1, 2, 3, 4], r"got \[0, 1, 2, 3, 4\]"),
        (np.arange(-2, 3), "samples from 0 on, got -2"),
    ],
    ids=["too few", "too many", "no integers", "a list", "negative"],
)
def test_an_order_that_draws_other_than_one_sample_per_position_is_refused(drawn, said):
    with pytest.raises(GraphError, match=said):
        Drawing(drawn).samples_at(5, np.arange(5))


@pytest.mark.parametrize("results", [[], [1, 1]], ids=["none", "two"])
def test_an_operator_of_bundles_gives_one_result_for_each_sample(results):
    class Odd(pg.Operator, BundleMap):
        def work_into(self, made, bundle, start):
            for _ in bundle.data[start:]:
                made.extend(results)

        def process(self, chunk):
            return chunk

    graph = pg.Graph("odd")
    graph.add(ops.FromSequence(range(50))).then(Odd(), name="odd").then(ops.Batch(5, collate=list))
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="stage 'odd': Odd gave .* results for .* samples"),
    ):
        list(loader)


def test_a_failure_of_an_epoch_that_was_cut_short_is_not_one_of_the_next():
    """It was in the queue already, behind the item at which all ranks ended."""
    contents = Contents(8, None, False, 1, None)
    late = Failure(ValueError("late"), 0)
    first, second = (Chunk(data, ((0, data),), data) for data in (0, 1))
    contents.ready.extend([first, late, second])
    contents.held = 2
    assert contents.take_out(0) == [first]
    assert list(contents.ready) == [second] and contents.held == 1


def test_replace_needs_a_source_that_knows_a_samples_neighbours():
    class Rows(pg.Source):
        random_access = True

        def length(self, epoch, rank, world_size):
            return 6

        def positions(self, epoch, rank, world_size, start):
            return iter(range(start, 6))

        def read(self, position, epoch):
            return position

    graph = pg.Graph("replace")
    graph.add(Rows(), name="rows").then(abs, name="work", on_error=pg.Replace())
    with pytest.raises(
        GraphError, match=r"stage 'work': Replace\(\) asks the source .* pipegraph.capabilities.Neighbours"
    ):
        graph.plan()
