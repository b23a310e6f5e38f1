"""Share budgets: judged from the 100th item on, and again at the epoch's end; the first skip of a stage warns once."""

import itertools
import logging
import threading

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import RowOperator
from tests.engine.breaking_stages import Broken, breaks, collect, make

pytestmark = pytest.mark.usefixtures("no_leaks")


PLACEMENTS = [
    {"backend": "inline"},
    {"backend": "inline", "capacity": 1},
    {"workers": 1},
    {"workers": 4},
    {"workers": 4, "capacity": 1},
    {"workers": 4, "ordered": False},
]
placed = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


@placed
def test_a_share_is_judged_again_at_the_end_of_the_epoch(placement):
    got, error, loader = collect(make(breaks(*range(99)), 1000, on_error=pg.Skip(0.05), **placement))
    assert str(error) == (
        "stage 'work': 99 of the 1000 items of epoch 0 failed, which exceeds the budget of 0.05 in "
        "on_error=Skip(budget=0.05); loader.profile().quarantined lists them"
    )
    assert isinstance(error, pg.errors.BudgetError)
    assert len(loader.profile().quarantined) == 99
    if placement.get("ordered", True):
        assert got == list(range(99, 1000))


def test_every_epoch_is_judged_by_itself():
    graph = make(
        breaks(*range(100, 150)),
        source=ops.FromIterable(lambda epoch: range(100 * epoch, 100 * epoch + 100)),
        workers=3,
        on_error=pg.Skip(0.3),
    )
    with graph.loader(epochs=3) as loader:
        assert len(list(loader)) == 100
        with pytest.raises(pg.errors.BudgetError, match="50 of the 100 items of epoch 1"):
            list(loader)
        assert len(list(loader)) == 100


def test_rows_of_batches_routes_regroups_flat_maps_and_bundles_are_judged_at_the_end():
    def refuse(x):
        raise ValueError(x)

    def collate(items):
        if 0 in items:
            raise ValueError(items)
        return items

    def chain(*nodes):
        graph = pg.Graph("g")
        node = graph.add(ops.FromSequence(range(12)), name="source")
        for number, (operator, options) in enumerate(nodes):
            node = node.then(operator, name=f"n{number}", **options)
        return graph

    skip = {"on_error": pg.Skip(0.2)}
    for graph in (
        chain((ops.FlatMap(refuse), skip)),
        chain((ops.Filter(refuse), skip)),
        chain((ops.Route(refuse, 1), skip)),
        chain((ops.Batch(3, collate=collate), {"on_error": pg.Skip(0.05)})),
        chain((refuse, skip), (ops.Batch(3), {})),
        chain((refuse, skip | {"workers": 2}), (ops.Batch(3), {})),
        chain((ops.DecodeImage(8), skip)),
        chain(
            (ops.Batch(3, collate=lambda xs: {"bytes": [b"no"] * len(xs)}), {}),
            (ops.DecodeImage(8), skip | {"workers": 2}),
        ),
    ):
        _, error, _ = collect(graph)
        assert isinstance(error, pg.errors.BudgetError), graph


def test_what_failed_while_an_epoch_was_only_prefetched_counts_in_it():
    calls, prefetched, begun = itertools.count(), threading.Event(), threading.Event()

    def work(x):
        call = next(calls)
        if call == 6:  # the third of epoch 1
            prefetched.set()
            begun.wait(60)
        if call > 3:
            raise Broken(x)
        return x

    graph = pg.Graph("ahead")
    graph.add(ops.FromSequence(range(4)), capacity=1).then(work, on_error=pg.Skip(2))
    with graph.loader(epochs=2) as loader:
        assert list(loader) == [0, 1, 2, 3]
        assert prefetched.wait(60)
        passing = iter(loader)
        begun.set()
        with pytest.raises(Broken, match="2"):
            next(passing)


# -- the first skip warns --------------------------------------------------------------------------


@placed
def test_the_first_skip_of_a_stage_is_logged_once(caplog, placement):
    with caplog.at_level(logging.WARNING, logger="pipegraph"):
        graph = make(breaks(3, 7), on_error=pg.Skip(), **placement)
        with graph.loader(epochs=2) as loader:
            for _ in range(2):
                list(loader)
    (record,) = caplog.records
    assert record.name == "pipegraph" and record.levelno == logging.WARNING
    if placement.get("ordered", True):
        assert record.getMessage() == (
            "stage 'work': sample 3 at position 3, epoch 0, was left out: Broken: no 3. on_error=Skip(budget=None) "
            "says so; further ones are only counted, and listed in loader.profile().quarantined"
        )


class HalfFails(RowOperator):
    """Fails at the rows from 150 on."""

    def begin_batch(self, chunk):
        return chunk

    def do_row(self, chunk, row):
        if row >= 150:
            raise ValueError(row)

    def end_batch(self, chunk, kept):
        return chunk

    def process(self, chunk):
        return chunk


def test_a_share_is_of_the_rows_of_a_batch_that_came_before():
    graph = pg.Graph("rows")
    graph.add(ops.FromSequence(range(200))).then(ops.Batch(200)).then(HalfFails(), on_error=pg.Skip(0.02))
    with graph.loader() as loader, pytest.raises(ValueError, match="153"):
        list(loader)
