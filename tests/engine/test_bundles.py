"""Rows handed over in bundles: where, how many, and that nothing else changes. test_fuzz.py compares whole graphs."""

import threading

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.bundle import Bundle
from pipegraph.chunk import Lineages
from pipegraph.engine.kinds import source
from pipegraph.engine.stage import bundle_size as pacing, serial
from pipegraph.engine.stage.bundle_size import Pace


def bundle(count, before=0, nbytes=0, epoch=0):
    rows = list(range(before, before + count))
    made = Bundle(rows, Lineages("s", rows), epoch, before)
    made.nbytes = nbytes
    return made


def chain(*policies, source=None, batch=None, **options):
    graph = pg.Graph("rows")
    node = graph.add(source or ops.FromSequence(range(100)), name="rows", **options)
    for number, (function, policy) in enumerate(policies):
        node = node.then(ops.Map(function), name=f"map{number}", on_error=policy)
    node.then(batch or ops.Batch(10), name="batch")
    return graph


@pytest.fixture
def long_bundles(monkeypatch):
    monkeypatch.setattr(pacing, "BUNDLE_NS", 1 << 60)
    monkeypatch.setattr(pacing, "LONG_NS", 1 << 61)
    monkeypatch.setattr(source, "LONG_NS", 1 << 61)


# -- where -----------------------------------------------------------------------------------------


def test_bundles_end_where_a_batch_ends():
    rows = chain((lambda x: x, "raise")).plan().stages["rows"]
    assert (rows.bundle, rows.bundle_rows) == ("batch", 1020)


@pytest.mark.parametrize(
    "below",
    [
        pytest.param(lambda rows: rows, id="the loader"),
        pytest.param(lambda rows: rows.then(ops.Filter(bool)), id="a filter"),
        pytest.param(lambda rows: rows.then(ops.FlatMap(list)), id="an expanding stage"),
        pytest.param(lambda rows: rows.then(ops.Shuffle(5)), id="a window"),
        pytest.param(lambda rows: rows.then(ops.Batch(cost=abs, limit=10)), id="no fixed size"),
        pytest.param(lambda rows: rows.then(lambda x: x, workers=2, ordered=False), id="completion order"),
    ],
)
def test_rows_travel_in_bundles_whatever_comes_next(below):
    graph = pg.Graph("rows")
    below(graph.add(ops.FromSequence(range(10)), name="rows", capacity=8))
    assert graph.plan().stages["rows"].bundle_rows == 8


# -- how many --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "below", "own_thread"),
    [
        pytest.param({}, {}, False, id="left open"),
        pytest.param({"backend": "thread"}, {}, True, id="asked for"),
        pytest.param({"workers": 2}, {}, True, id="several workers"),
        pytest.param({}, {"backend": "process"}, True, id="processes take items ahead"),
    ],
)
def test_what_lies_in_memory_is_read_in_the_threads_of_the_stage_below(source, below, own_thread):
    graph = pg.Graph("rows")
    graph.add(ops.FromSequence(list(range(10))), name="rows", **source).then(ops.Map(abs), **below)
    assert (graph.plan().stages["rows"].backend == "thread") is own_thread
    with graph.loader() as loader:
        assert list(loader) == list(range(10))


def test_a_stage_that_its_reader_drives_never_waits_for_room(long_bundles):
    """What is left of a bundle behind a failed row is more than the queue admits, and only its reader could take it."""
    graph = pg.Graph("rows")
    rows = graph.add(ops.FromSequence([b"-" * size for size in range(100, 108)]))

    def work(row):
        if len(row) == 104:
            raise ValueError(row)
        return row

    rows.then(ops.Map(work), backend="inline", max_bytes=250)
    found = []
    with graph.loader() as loader, pytest.raises(ValueError, match="----"):
        for row in loader:
            found.append(len(row))
    assert found == [100, 101, 102, 103]


def test_an_inline_stage_with_many_children_keeps_to_its_capacity(long_bundles):
    graph = pg.Graph("rows")
    graph.add(ops.FromSequence([0, 1])).then(
        ops.FlatMap(lambda x: range(200)), name="many", backend="inline", capacity=4
    )
    with graph.loader() as loader:
        depths = [
            channel.depth
            for _ in loader
            for channel in loader.profile().channels
            if channel.producer == "many"
        ]
    assert len(depths) == 400
    assert max(depths) <= 4


def test_rows_that_are_made_do_not_wait_for_the_next_item(long_bundles):
    """Of an operator that takes whole bundles."""
    given = threading.Event()

    def documents():
        yield from [{"tokens": np.arange(4)}] * 3  # a bundle of one, and one of two
        assert given.wait(60), "what was packed has not been delivered"
        yield {"tokens": np.arange(4)}

    graph = pg.Graph("rows")
    graph.add(ops.FromIterable(documents)).then(ops.Pack(4))
    with graph.loader() as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                given.set()


def test_quick_rows_travel_in_longer_and_longer_bundles_and_slow_ones_alone():
    pace = Pace(64)
    sizes = []
    for _ in range(8):
        sizes.append(pace.rows())
        pace.note(sizes[-1], 1000, 0)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 64]
    for _ in range(4):
        pace.note(pace.rows(), 1 << 40, 0)
    assert pace.rows() == 1


def test_a_row_that_took_long_does_not_wait_for_the_next_one(monkeypatch):
    """Of an operator in sequence: quick rows of a bundle leave it together."""
    monkeypatch.setattr(serial, "BUNDLE_NS", -1)
    seen = [threading.Event() for _ in range(5)]

    class Slow(pg.Operator):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

        def process(self, chunk):
            assert not chunk.data or seen[chunk.data - 1].wait(60), "the row before has not been delivered"
            return chunk

    graph = pg.Graph("rows")
    graph.add(ops.FromSequence(list(range(5)))).then(Slow())
    with graph.loader() as loader:
        for row in loader:
            seen[row].set()


# -- what stays the same ---------------------------------------------------------------------------


def odd(x):
    if int(x) % 7 == 3:
        raise ValueError(f"{x} is odd")
    return x


def outcome(graph, count=None):
    with graph.loader() as loader:
        found = []
        try:
            for chunk in loader.chunks():
                found.append((chunk.keys, tuple(chunk.lineages), chunk.before, chunk.after, repr(chunk.data)))
        except ValueError as error:
            found.append((str(error), error.__notes__))
        profile = loader.profile()
        counts = {
            name: (stage.items, stage.samples, stage.failed, stage.retried, stage.dropped)
            for name, stage in profile.stages.items()
        }
        return found, profile.quarantined, counts


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("policy", ["raise", pg.Skip(), pg.Skip(5), pg.Retry(2, then=pg.Skip())], ids=repr)
def test_a_row_that_fails_has_its_own_key_place_and_policy(long_bundles, workers, policy):
    found, quarantined, counts = outcome(chain((odd, policy), workers=workers))
    expected, ledger, inline = outcome(chain((odd, policy), backend="inline"))
    assert expected == found
    assert ledger == quarantined
    if policy == "raise":
        assert "sample 3 at position 3" in found[-1][1][0]
    elif not isinstance(policy, pg.Skip) or policy.budget is None:
        assert inline == counts


def test_an_iterable_that_breaks_off_delivers_what_came_before(long_bundles):
    def broken():
        yield from range(25)
        raise ValueError("gone")

    found, *_ = outcome(chain(source=ops.FromIterable(broken)))
    expected, *_ = outcome(chain(source=ops.FromIterable(broken), backend="inline"))
    assert expected == found
    assert "item 25 of this rank" in found[-1][1][0]


# -- items that had to be waited for ----------------------------------------------------------------
