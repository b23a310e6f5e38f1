"""What the engine's operators deliver."""

import asyncio
import gc
import itertools
import threading

import numpy as np
import pytest
import torch
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError

pytestmark = pytest.mark.usefixtures("no_leaks")


def run(make, epochs=1, **options):
    graph = pg.Graph("g", seed=2)
    make(graph)
    with graph.loader(epochs=epochs, **options) as loader:
        passes = [list(loader) for _ in range(epochs)]
    return passes[0] if epochs == 1 else passes


def chain(items, *operators, **options):
    def make(graph):
        node = graph.add(ops.FromIterable(items))
        for operator in operators:
            node = node.then(operator)

    return run(make, **options)


# -- functions -------------------------------------------------------------------------------------


def test_map_filter_flatmap():
    assert chain(range(6), lambda x: x * x) == [0, 1, 4, 9, 16, 25]
    assert chain(range(6), ops.Filter(lambda x: x % 2)) == [1, 3, 5]
    assert chain(range(4), ops.FlatMap(lambda x: [x] * x)) == [1, 2, 2, 3, 3, 3]


def test_flatmap_reads_lazily_also_without_end():
    def endless(x):
        return itertools.count(x)

    graph = pg.Graph("g")
    graph.add(ops.FromIterable([5])).then(ops.FlatMap(endless))
    with graph.loader() as loader:
        assert list(itertools.islice(loader, 4)) == [5, 6, 7, 8]


@pytest.mark.parametrize("ordered", [True, False])
def test_async_functions_have_as_many_in_flight_as_workers(ordered):
    arrived, most = [], 5
    together = {}

    async def meet(x):
        barrier = together.setdefault("barrier", asyncio.Barrier(most))
        arrived.append(x)
        await barrier.wait()  # only five at once get through
        return -x

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(10))).then(meet, workers=most, ordered=ordered)
    with graph.loader() as loader:
        found = list(loader)
    assert (found if ordered else sorted(found, reverse=True)) == [-x for x in range(10)]


def test_async_functions_are_cancelled_by_a_break_and_go_on_in_the_next_pass():
    waiting = threading.Semaphore(0)

    async def stuck(x):
        if x == 3:
            waiting.release()
            await asyncio.Event().wait()
        return x

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(6))).then(stuck, workers=2, name="stuck")
    with graph.loader(epochs=3) as loader:
        for _ in range(3):
            assert list(itertools.islice(loader, 3)) == [0, 1, 2]
            assert waiting.acquire(timeout=60)


def test_async_functions_that_a_break_keeps_from_starting_leave_no_warning():
    async def at_once(x):
        return x

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(100))).then(at_once, workers=8)
    with graph.loader(epochs=100) as loader:
        for _ in range(100):
            assert next(iter(loader)) == 0
    gc.collect()  # Python warns when it frees a coroutine that nobody has awaited


# -- batches ---------------------------------------------------------------------------------------


def test_batch_stacks_as_default_collate_does_and_keeps_text_as_lists():
    sample = {
        "i": 1,
        "f": 0.5,
        "b": True,
        "a": np.ones((2, 2), np.float32),
        "t": torch.arange(3),
        "s": "x",
        "y": b"z",
    }
    (batch,) = chain([dict(sample) for _ in range(3)], ops.Batch(3))
    default = torch.utils.data.default_collate([{k: v for k, v in sample.items() if k not in "sy"}] * 3)
    for key, value in default.items():
        assert torch.equal(batch[key], value) and batch[key].dtype == value.dtype
    assert batch["s"] == ["x"] * 3 and batch["y"] == [b"z"] * 3


def test_the_last_batch_is_short_or_dropped():
    assert chain(range(7), ops.Batch(3, collate=list)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert chain(range(7), ops.Batch(3, collate=list, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]


def test_batches_by_cost_stay_within_the_limit():
    assert chain([3, 3, 1, 5, 2, 2], ops.Batch(cost=lambda x: x, limit=6, collate=list)) == [
        [3, 3],
        [1, 5],
        [2, 2],
    ]
    with pytest.raises(DataError, match="one sample costs 9, more than limit=6"):
        chain([3, 9], ops.Batch(cost=lambda x: x, limit=6))


def test_ragged_fields_are_padded_or_an_error_that_names_them():
    samples = [{"x": np.arange(i + 1)} for i in range(3)]
    (batch,) = chain(samples, ops.Batch(3, pad=-1))
    assert batch["x"].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    with pytest.raises(DataError, match=r"field 'x': arrays of shapes \(1,\) and \(2,\) cannot be stacked"):
        chain(samples, ops.Batch(3))


def test_global_size_is_shared_among_the_ranks():
    def make(graph):
        graph.add(ops.FromSequence(range(24))).then(ops.Batch(global_size=6, collate=list))

    assert run(make, rank=1, world_size=3) == [[1, 4], [7, 10], [13, 16], [19, 22]]
    with pytest.raises(GraphError, match="global_size=6 is not a multiple of the 4 ranks; use 4 or 8"):
        run(make, rank=0, world_size=4)


# -- windows ---------------------------------------------------------------------------------------


def test_shuffle_permutes_consecutive_windows_anew_in_each_epoch():
    first, second = chain(range(20), ops.Shuffle(8), epochs=2)
    assert [sorted(first[i : i + 8]) for i in (0, 8, 16)] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 20)),
    ]
    assert first != list(range(20)) and first != second


def test_bucket_lets_samples_of_similar_length_leave_together():
    lengths = [1, 9, 2, 8, 1, 7, 3, 9, 20]
    out = chain(lengths, ops.Bucket(lambda x: x, [5, 10], size=2), ops.Batch(2, collate=list))
    assert out == [[1, 2], [9, 8], [1, 3], [7, 9], [20]]


# -- fan-out and fan-in ----------------------------------------------------------------------------


def two(graph, a=range(5), b=range(10, 13)):
    return graph.add(ops.FromIterable(a), name="a"), graph.add(ops.FromIterable(b), name="b")


def test_zip_ends_with_the_shortest():
    assert run(lambda g: g.add(ops.Zip(), *two(g))) == [(0, 10), (1, 11), (2, 12)]


def test_concat_is_one_after_the_other():
    assert run(lambda g: g.add(ops.Concat(), *two(g))) == [0, 1, 2, 3, 4, 10, 11, 12]


def test_mix_draws_by_weights_and_is_the_same_on_every_rank():
    def make(graph):
        a = graph.add(ops.FromSequence([0] * 4000), name="a")
        b = graph.add(ops.FromSequence([1] * 4000), name="b")
        graph.add(ops.Mix([3, 1]), a, b)

    whole = run(make)
    assert 0.22 < sum(whole) / len(whole) < 0.28
    parts = [run(make, rank=r, world_size=2, equal_steps=False) for r in range(2)]
    shortest = min(map(len, parts))
    assert parts[0][:shortest] == parts[1][:shortest] == whole[:shortest]


def test_mix_ends_with_the_first_or_continues_until_all_have_ended():
    first = run(lambda g: g.add(ops.Mix([1, 1]), *two(g)))
    every = run(lambda g: g.add(ops.Mix([1, 1], stop="all"), *two(g)))
    assert every[: len(first)] == first
    assert sorted(every) == [0, 1, 2, 3, 4, 10, 11, 12]
    assert [x for x in every if x < 10] == [0, 1, 2, 3, 4]


def test_mix_shares_out_the_weight_of_an_input_that_has_ended():
    def make(graph):
        inputs = [graph.add(ops.FromSequence([i] * n), name=f"s{i}") for i, n in enumerate((30, 2000, 2000))]
        graph.add(ops.Mix([6, 3, 1], stop="all"), *inputs)

    mixed = run(make)
    behind = mixed[len(mixed) - mixed[::-1].index(0) :][:1500]
    assert 0.72 < behind.count(1) / len(behind) < 0.78


def test_branches_that_can_never_meet_end_with_an_error_that_names_the_queue():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(lambda: itertools.count()), name="source")
    graph.add(ops.Concat(), source.then(ops.Filter(lambda x: False), name="none"), source)
    with (
        graph.loader(memory_limit="400 kB") as loader,
        pytest.raises(
            pg.PipegraphError,
            match=r"the queue source -> concat has had to hold \d+ items, because the branches of a fan-out",
        ),
    ):
        list(loader)


def test_route_sends_each_chunk_to_one_output_and_merge_takes_one_of_each_in_turn():
    def make(graph):
        route = graph.add(ops.FromIterable(range(30))).then(ops.Route(lambda x: x % 3, 3))
        graph.add(
            ops.Merge(),
            route[0].then(lambda x: ("a", x), workers=3, name="a"),
            route[2].then(lambda x: ("c", x), name="c"),
            route[1],
        )

    assert run(make) == [each for x in range(0, 30, 3) for each in (("a", x), ("c", x + 2), x + 1)]


def test_a_route_that_chooses_no_output_fails_at_its_item():
    def make(graph):
        route = graph.add(ops.FromIterable(range(5))).then(ops.Route(lambda x: x, 2), name="route")
        graph.add(ops.Merge(), route[0], route[1])

    with pytest.raises(IndexError, match="choose returned output 2, there are 2") as caught:
        run(make)
    assert any("stage 'route', sample 2 at position 2" in note for note in caught.value.__notes__)


# -- completion order ------------------------------------------------------------------------------


def test_in_completion_order_a_slow_item_does_not_hold_the_others_up():
    from gates import Gate

    gate, graph = Gate(), pg.Graph("g")
    graph.add(ops.FromIterable(range(8))).then(gate, workers=2, ordered=False, capacity=8)
    gate.release_position(*range(1, 8))
    with graph.loader() as loader:
        items = iter(loader)
        assert sorted(next(items) for _ in range(7)) == list(range(1, 8))
        gate.release_position(0)
        assert list(items) == [0]


def test_in_completion_order_a_stage_runs_only_a_window_ahead_of_its_oldest_item():
    from gates import Gate

    gate, graph = Gate(), pg.Graph("g")
    graph.add(ops.FromIterable(range(1000))).then(gate, workers=2, ordered=False, capacity=3)
    gate.release_position(*range(1, 1000))
    with graph.loader() as loader:
        items = iter(loader)
        early = [next(items) for _ in range(4 * (2 + 3) - 1)]
        assert sorted(early) == list(range(1, 20))
        channel = next(iter(loader._crew.run.channels.values()))
        wait_until(channel, lambda s: s.getters_waiting == 1)  # the other worker waits for the window
        assert loader._crew.run.terminal.stats().depth == 0
        gate.release_all()
        assert sorted([*early, *items]) == list(range(1000))


# -- users' own operators of each kind ---------------------------------------------------------------


class Double(pg.Operator):
    def process(self, chunk):
        return chunk.replace(chunk.data * 2)


class Letters(pg.Operator):
    kind = "expand"
    one_to_one = False

    def process(self, chunk):
        for index, letter in enumerate(chunk.data):
            yield chunk.child(index, letter)


class Latest(pg.FanOut):
    outputs = 2

    def choose(self, chunk):
        return chunk.data > 2

    def process(self, chunk):
        return chunk


class Count(pg.Source):
    def __init__(self, n):
        self.n = n

    def iterate(self, epoch, rank, world_size, start):
        for step in range(start, self.n):
            yield step, step * step


class Opened(pg.Operator):
    """Counts what the engine calls."""

    def __init__(self):
        self.log, self.lock = [], threading.Lock()

    def open(self, context):
        self.worker = context.worker
        with self.lock:
            self.log.append(("open", context.stage, context.worker, threading.current_thread().name))

    def process(self, chunk):
        return chunk

    def close(self):
        with self.lock:
            self.log.append(("close", self.worker, threading.current_thread().name))


def test_users_operators_of_each_kind():
    assert chain(range(4), Double()) == [0, 2, 4, 6]
    assert chain(["ab", "", "c"], Letters()) == ["a", "b", "c"]
    assert run(lambda g: g.add(Count(5)).then(Double())) == [0, 2, 8, 18, 32]

    def routed(graph):
        route = graph.add(ops.FromIterable(range(5))).then(Latest())
        graph.add(ops.Concat(), route[1], route[0])

    assert run(routed) == [3, 4, 0, 1, 2]


def test_each_worker_opens_and_closes_its_own_copy_once_in_its_own_thread():
    operator, graph = Opened(), pg.Graph("g")
    graph.add(ops.FromIterable(range(20))).then(operator, name="op", workers=3)
    with graph.loader(epochs=3) as loader:
        for _ in range(2):
            list(loader)
        next(iter(loader))
    opened = sorted(entry[2:] for entry in operator.log if entry[0] == "open")
    assert opened == [(i, f"pipegraph-g-op-{i}") for i in range(3)]
    assert sorted(entry[1:] for entry in operator.log if entry[0] == "close") == opened


@pytest.mark.parametrize("value", [float("nan"), -1, "a", None, torch.ones(2)])
@pytest.mark.parametrize(
    ("operator", "what"),
    [
        (lambda value: ops.Batch(cost=lambda x: value, limit=9), "Batch: cost"),
        (lambda value: ops.Bucket(lambda x: x, [3], cost=lambda x: value, limit=9), "Bucket: cost"),
    ],
)
def test_a_cost_that_is_no_number_of_at_least_0_is_named(operator, what, value):
    """A batch of NaN took one sample each, one of negative costs the whole epoch."""
    graph = pg.Graph("costs")
    graph.add(ops.FromSequence(range(8))).then(operator(value))
    with (
        graph.loader() as loader,
        pytest.raises(DataError, match=rf"{what}\(sample\) must be a number >= 0, got"),
    ):
        list(loader)
