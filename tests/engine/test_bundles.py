"""Rows handed over in bundles: where, how many, and that nothing else changes. test_fuzz.py compares whole graphs."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.bundle import UNNAMED, Bundle, joined
from pipegraph.chunk import Chunk, Lineages
from pipegraph.columns import pack
from pipegraph.contracts import Drawn, DrawnRows
from pipegraph.engine.channel import Channel
from pipegraph.engine.contents import LIGHT_BYTES
from pipegraph.engine.kinds import source
from pipegraph.engine.stage import bundle_size as pacing
from pipegraph.engine.stage.bundle_size import Pace
from pipegraph.operators.collate import batch_of, collate
from pipegraph.planning.digests import digests


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
    "graph",
    [
        pytest.param(lambda: chain(backend="inline"), id="inline"),
        pytest.param(lambda: chain(capacity=1), id="no room"),
    ],
)
def test_elsewhere_rows_travel_one_by_one(graph):
    assert graph().plan().stages["rows"].bundle_rows == 1


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


def test_what_another_stage_reads_too_travels_one_by_one():
    graph = pg.Graph("fan-out")
    rows = graph.add(ops.FromSequence(range(10)), name="rows")
    batches = rows.then(ops.Batch(2)).then(ops.Unbatch())
    both = graph.add(ops.Zip(), batches, rows)
    assert graph.plan(both).stages["rows"].bundle_rows == 1


def test_bundles_change_no_digest():
    assert digests(chain().plan()) == digests(chain(backend="inline").plan())


# -- how many --------------------------------------------------------------------------------------


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


def test_a_slow_stage_takes_few_of_the_rows_that_came_together():
    channel = Channel(64, bundle_rows=64)
    shared = []
    channel.share = shared.append
    whole = bundle(10, nbytes=100)
    whole.buffers = ((1, 100),)
    channel.put(whole)
    assert [(ticket, part.data) for ticket, part in (channel.take(4), channel.take(1))] == [
        (0, [0, 1, 2, 3]),
        (1, [4]),
    ]
    assert (channel.stats().depth, channel.stats().nbytes) == (5, 50)
    ticket, rest = channel.take(100)
    assert (ticket, rest.data, rest.before, rest.after) == (2, [5, 6, 7, 8, 9], 5, 10)
    assert shared == [((1, 100),)] * 2  # each part holds them


@pytest.mark.parametrize(
    ("readers", "rows", "expected"),
    [(2, 55, [32, 32]), (2, 30, [22, 21, 21]), (2, 64, [64]), (2, 1, [1] * 64), (1, 55, [55, 9])],
)
def test_what_a_bundle_holds_is_dealt_evenly_among_several_readers(readers, rows, expected):
    channel = Channel(64, bundle_rows=64)
    channel.readers = readers
    channel.put(bundle(64))
    assert [channel.take(rows)[1].count for _ in expected] == expected
    assert channel.stats().depth == 0


def test_a_bundle_ends_with_its_batch():
    pace = Pace(64, 16, 20)
    assert [pace.rows(0), pace.rows(16), pace.rows(20)] == [16, 4, 16]


def test_heavy_rows_travel_in_short_bundles():
    pace = Pace(64, nbytes=1000)
    for _ in range(8):
        pace.note(pace.rows(), 1000, 300 * pace.rows())
    assert pace.rows() == 3


# -- queues ----------------------------------------------------------------------------------------


def test_the_rows_of_a_bundle_count_one_by_one():
    channel = Channel(10, bundle_rows=5)
    assert channel.put(bundle(5))
    assert channel.put(bundle(4, 5))
    assert channel.stats().depth == 9
    writer = threading.Thread(target=channel.put, args=(bundle(2, 9),))
    writer.start()
    wait_until(channel, lambda stats: stats.putters_waiting == 1)
    assert len(channel.get()) == 5
    writer.join(5)
    assert channel.stats().depth == 6
    assert [len(channel.get()), len(channel.get())] == [4, 2]
    assert channel.stats().depth == 0


def test_a_later_worker_leaves_room_for_a_whole_bundle_of_the_next():
    channel = Channel(8, sequenced=True, bundle_rows=4)
    assert channel.put_at(1, bundle(4, 4))
    writer = threading.Thread(target=channel.put_at, args=(2, bundle(1, 8)))
    writer.start()
    wait_until(channel, lambda stats: stats.putters_waiting == 1)
    assert channel.put_at(0, bundle(4))
    channel.get()
    writer.join(5)
    assert channel.stats().depth == 5


def test_only_light_rows_fill_a_queue_beyond_a_few():
    channel = Channel(100, bundle_rows=2, heavy_capacity=4)
    for before in (0, 2):
        assert channel.put(bundle(2, before, LIGHT_BYTES))
    writer = threading.Thread(target=channel.put, args=(bundle(1, 4),))
    writer.start()
    wait_until(channel, lambda stats: stats.putters_waiting == 1)
    channel.get()
    writer.join(5)
    channel.get()
    for before in range(5, 60, 2):
        assert channel.put(bundle(2, before, 10))
    assert channel.stats().depth == 57


def test_a_discarded_epoch_gives_back_the_room_of_its_bundles():
    channel = Channel(4, bundle_rows=4)
    channel.put(bundle(4))
    assert [len(chunk) for chunk in channel.discard(0)] == [4]
    assert channel.stats().depth == 0
    assert not channel.put(bundle(4))
    assert channel.put(bundle(4, epoch=1))


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


class Rough:
    """Row 33 cannot be read; several at once where the subclass offers it."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 33:
            raise ValueError("unreadable")
        return {"key": f"k{index}", "x": np.full(3, index)}


class Several(Rough):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("dataset", [Rough, Several])
@pytest.mark.parametrize("policy", ["raise", pg.Skip(), pg.Retry(2, then=pg.Skip())], ids=repr)
def test_a_row_that_cannot_be_read_has_its_policy(long_bundles, dataset, policy):
    found, quarantined, counts = outcome(
        chain(source=ops.FromSequence(dataset()), on_error=policy, workers=2)
    )
    expected, ledger, inline = outcome(
        chain(source=ops.FromSequence(Rough()), on_error=policy, backend="inline")
    )
    assert expected == found
    assert ledger == quarantined
    if policy != "raise":
        assert inline == counts


def test_keys_stay_with_rows_whose_function_drops_the_field(long_bundles):
    graph = chain(
        (lambda row: {"x": row["x"] + 1}, "raise"),
        source=ops.FromSequence([{"key": f"k{i}", "x": i} for i in range(20)]),
    )
    with graph.loader() as loader:
        chunks = list(loader.chunks())
    assert [f"k{i}" for i in range(20)] == [key for chunk in chunks for key in chunk.keys]
    assert list(chunks[0].data) == ["x"]


def test_functions_that_draw_get_each_rows_own_numbers(long_bundles):
    def draw(x, rng):
        return float(rng.random())

    threads, *_ = outcome(chain((draw, "raise"), workers=2))
    inline, *_ = outcome(chain((draw, "raise"), backend="inline"))
    assert inline == threads


def test_a_queue_never_holds_more_rows_than_its_capacity_and_memory_is_given_back(long_bundles):
    graph = chain(source=ops.FromSequence([np.ones(100) for _ in range(200)]), capacity=8)
    with graph.loader() as loader:
        passing = iter(loader)
        next(passing)
        run = loader._crew.run
        channel = run.channels["batch", 0]
        wait_until(channel, lambda stats: stats.putters_waiting == 1)
        assert channel.stats().depth <= 8
        assert len(list(passing)) == 19
        assert run.account.used == 0


def test_rows_larger_than_their_share_of_the_limit_do_not_travel_together(long_bundles):
    graph = chain(
        source=ops.FromSequence([np.zeros(100_000, np.uint8) for _ in range(50)]), batch=ops.Batch(5)
    )
    with graph.loader(memory_limit="2MB") as loader:
        assert len(list(loader)) == 10
        assert (
            loader._crew.run.account.peak <= 3_200_000
        )  # with what is being worked on: an open batch, a row, a batch


def test_each_epoch_of_an_iterable_begins_with_its_first_row(long_bundles):
    graph = chain(source=ops.FromIterable(range(25)))
    with graph.loader(epochs=3) as loader:
        passes = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert [[list(range(10)), list(range(10, 20)), list(range(20, 25))]] * 3 == passes


def test_an_iterable_that_breaks_off_delivers_what_came_before(long_bundles):
    def broken():
        yield from range(25)
        raise ValueError("gone")

    found, *_ = outcome(chain(source=ops.FromIterable(broken)))
    expected, *_ = outcome(chain(source=ops.FromIterable(broken), backend="inline"))
    assert expected == found
    assert "item 25 of this rank" in found[-1][1][0]


def test_bundles_may_be_longer_than_the_queue_of_positions(long_bundles):
    graph = chain(source=ops.FromSequence(range(4000)), batch=ops.Batch(1000), capacity=1000)
    with graph.loader() as loader:
        assert [batch.tolist() for batch in loader] == [
            list(range(at, at + 1000)) for at in range(0, 4000, 1000)
        ]


# -- columns ---------------------------------------------------------------------------------------

KINDS = {
    "ints": [1, 2, 3, 4],
    "floats": [1.5, 2.5, float("nan"), 0.0],
    "bools": [True, False, True, True],
    "arrays": [np.full((2, 3), i, np.float32) for i in range(4)],
    "numbers in arrays": [np.array(i) for i in range(4)],
    "tensors": [torch.full((3,), i) for i in range(4)],
    "texts": ["a", "b", "c", "d"],
    "dicts": [{"x": np.full(2, i), "y": i, "t": b"b"} for i in range(4)],
    "tuples": [(i, torch.tensor(i), {"z": 1.0}) for i in range(4)],
    "ragged": [np.ones(1 + i // 2) for i in range(4)],
    "mixed": [1, 2, 3.5, 4.5],
    "odd dicts": [{"x": 1}, {"x": 2}, {"y": 3}, {"y": 4}],
}
REFUSED = {"ragged", "odd dicts"}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_rows_packed_in_parts_make_the_batch_that_they_make_one_by_one(name, cut):
    items = KINDS[name]
    parts = [pack(items[start : start + cut]) for start in range(0, 4, cut)]
    if name in REFUSED:
        with pytest.raises(pg.PipegraphError) as expected:
            collate(items)
        if None not in parts:
            with pytest.raises(pg.PipegraphError) as found:
                batch_of(parts, None)
            assert str(expected.value) == str(found.value)
    elif None not in parts:
        assert repr(collate(items)) == repr(batch_of(parts, None))
        assert repr(items) == repr([row for part in parts for row in part.rows()])


def test_a_batch_keeps_no_more_memory_than_its_own_rows():
    whole = pack([np.zeros(10) for _ in range(10)])
    batch = batch_of([whole.part(2, 4)], None)
    assert batch.nbytes == batch.untyped_storage().nbytes()


def test_a_chunk_of_bundles_is_as_the_chunk_of_their_rows():
    rows = [{"key": "a", "x": 1}, {"x": 2}, {"x": 3}]
    made = Bundle(rows, Lineages("s", [4, 5, 6]), 1, 7, ["a", UNNAMED, UNNAMED])
    one_by_one = Chunk.group([made.one(index) for index in range(3)], None)
    for whole in (joined([made]), joined([made.part(0, 2), made.part(2, 3)])):
        for name in ("keys", "before", "after", "epoch", "batched"):
            assert getattr(one_by_one, name) == getattr(whole, name)
        assert one_by_one.lineages == tuple(whole.lineages)
        assert whole.positions.tolist() == [4, 5, 6]


def test_rows_of_a_mapped_file_are_packed_too(tmp_path):
    np.arange(12, dtype=np.int64).tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.int64, mode="r")
    rows = [mapped[start : start + 3] for start in range(0, 12, 3)]
    packed = pack(rows)
    assert packed is not None
    assert batch_of([packed], None).tolist() == collate(rows).tolist() == np.arange(12).reshape(4, 3).tolist()


def test_bundles_that_go_to_a_process_may_take_longer():
    here, remote = Pace(64), Pace(64, cost=10)
    for pace in (here, remote):
        for _ in range(8):
            pace.note(pace.rows(), 1_000_000 * pace.rows(), 0)
    assert here.rows() == 1
    assert remote.rows() == 10


# -- items that had to be waited for ----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("kind", ["source", "generator"])
def test_a_source_or_generator_that_took_long_once_hands_over_row_by_row(kind, backend, tmp_path):
    """Each item from the second on is made only once the loop has had the one before."""
    path = str(tmp_path / "had")
    os.mkfifo(path)

    def items(_=None):
        with open(path, "rb", buffering=0) as had:
            yield 0
            time.sleep(0.05)
            for number in range(1, 30):
                yield number
                had.read(1)

    graph = pg.Graph("waits")
    if kind == "source":
        graph.add(ops.FromIterable(items), backend=backend)
    else:
        graph.add(ops.FromSequence([0])).then(ops.FlatMap(items), backend=backend)
    with graph.loader() as loader:
        passing = iter(loader)
        with open(path, "wb", buffering=0) as had:
            for number in range(30):
                assert next(passing) == number
                if number:
                    had.write(b".")


def test_a_bundle_holds_no_more_than_a_millisecond_of_measured_work():
    pace = Pace(64)
    for _ in range(8):
        pace.note(pace.rows(), 300_000 * pace.rows(), 0)
    assert pace.rows() == 3


def test_an_endless_expansion_keeps_nothing_of_what_has_left():
    import gc
    import weakref

    class Item:
        pass

    made = []

    def endless(_):
        while True:
            made.append(weakref.ref(item := Item()))
            yield item
            del item

    graph = pg.Graph("endless")
    graph.add(ops.FromIterable([0])).then(ops.FlatMap(endless), capacity=4)
    with graph.loader() as loader:
        for _, _item in zip(range(500), loader, strict=False):
            pass
        del _item
        gc.collect()
        assert sum(each() is not None for each in made) < 100


class Drawing(pg.Source):
    """Draws, and is read row by row: row 2 only once row 0 has been asked for by the next stage."""

    random_access = True
    traits = pg.Traits(sampled=True)

    def __init__(self):
        self.asked = threading.Event()

    def length(self, epoch, rank, world_size):
        return 8

    def positions(self, epoch, rank, world_size, start):
        return (Drawn(np.int64(step), -step) for step in range(start, 8))

    def index_of(self, position, epoch):
        return position.index

    def read(self, position, epoch):
        if position.position == 2:
            assert self.asked.wait(60)
        return position.index


def test_a_source_of_ones_own_that_draws_is_read_row_by_row(long_bundles):
    source = Drawing()
    graph = pg.Graph("drawn")
    rows = graph.add(source, name="rows", capacity=8)
    rows.then(lambda row: source.asked.set() or row, name="asks").then(ops.Batch(4, collate=list))
    with graph.loader() as loader:
        assert [list(batch) for batch in loader] == [[0, -1, -2, -3], [-4, -5, -6, -7]]


def test_drawn_rows_are_a_sequence_of_drawn():
    rows = DrawnRows([], [])
    rows.extend(Drawn(np.int64(at), "abc"[at]) for at in range(3))
    assert list(rows) == [(0, "a"), (1, "b"), (2, "c")]
    assert rows[1] == Drawn(1, "b")
    assert list(rows[1:]) == [(1, "b"), (2, "c")]
    assert all(type(position) is int for position in rows.positions)


def test_threads_that_share_a_pass_get_each_row_once():
    """Rows of one bundle go out without a lock; without the GIL two threads could get the same one."""
    with pg.Graph("shared").add(ops.FromSequence(range(20_000))).graph.loader(epochs=4) as loader:
        for _ in range(4):
            shares, rows, begin = ([], [], []), iter(loader), threading.Barrier(3, timeout=60)

            def pull(share, rows=rows, begin=begin):
                begin.wait()
                for row in rows:
                    share.append(row)

            pulling = [threading.Thread(target=pull, args=(share,)) for share in shares]
            for thread in pulling:
                thread.start()
            for thread in pulling:
                thread.join()
            assert sorted(row for share in shares for row in share) == list(range(20_000))
        assert loader.profile().samples == 80_000
