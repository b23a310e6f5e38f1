"""Promise 1: bytes in flight stay within ``memory_limit``, and no bound ever locks a graph up."""

import re
import sys
import threading

import numpy as np
import pytest
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import MemoryLimitError
from pipegraph.tree import buffers

pytestmark = pytest.mark.usefixtures("no_leaks")

KB = 1000


def block(i, kilobytes=1):
    return np.full(kilobytes * KB, i % 250, np.uint8)


def wait_until_empty(account):
    """Blocks until nothing is counted: a fan-in whose epoch has ended reads what its other inputs still bring."""
    empty = threading.Event()
    wake = account._wake

    def look():
        wake()
        if account.used == 0:
            empty.set()

    account._wake = look  # called under the lock after every release
    account.nudge()
    assert empty.wait(60), account.used


def peak(graph, limit, epochs=1):
    """Runs it, sees that everything is released, and returns the most that was in flight."""
    with graph.loader(epochs=epochs, memory_limit=limit) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass
        account = loader._runtime.run.account
        wait_until_empty(account)
        return account.peak


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("ordered", [True, False])
def test_bytes_in_flight_never_exceed_the_limit(workers, ordered):
    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(range(300)), capacity=64).then(block, name="make", workers=workers)
    node = node.then(lambda x: x.copy(), name="copy", workers=workers, ordered=ordered)
    node.then(ops.Batch(4)).then(lambda x: x + 1, name="add", workers=workers)
    assert peak(graph, 60 * KB) <= 60 * KB


def test_a_limit_of_a_few_items_is_kept_and_everything_arrives():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(200)), capacity=64).then(block, name="make", capacity=64).then(
        lambda x: x + 1, name="add", capacity=64
    )
    assert peak(graph, 6 * KB) <= 6 * KB


@pytest.mark.parametrize("turn", range(5))
def test_many_workers_behind_a_small_limit_never_lock_up(turn):
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(300)), capacity=64).then(
        block, name="make", workers=6, capacity=64
    ).then(lambda x: x + 1, name="add", workers=5, capacity=64).then(ops.Batch(3))
    peak(graph, 24 * KB, epochs=2)


def test_one_item_larger_than_the_limit_is_an_error_that_names_the_stage_and_the_sizes():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(5))).then(lambda i: block(i, 50 if i == 3 else 1), name="make")
    with (
        graph.loader(memory_limit=20 * KB) as loader,
        pytest.raises(
            MemoryLimitError,
            match="stage 'make': one item of 50.0 kB is larger than memory_limit=20.0 kB; raise memory_limit",
        ),
    ):
        list(loader)


def test_an_item_larger_than_its_queues_share_still_passes():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(8))).then(lambda i: block(i, 15), name="make", max_bytes=10 * KB).then(
        lambda x: x[:5], name="small"
    )
    assert peak(graph, 60 * KB) <= 60 * KB


@pytest.mark.parametrize("make", [lambda: ops.Shuffle(100), lambda: ops.Batch(100, collate=list)])
def test_a_limit_too_small_for_a_window_is_a_clear_error_and_no_deadlock(make):
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(200))).then(block, name="make").then(make(), name="window")
    with (
        graph.loader(memory_limit=50 * KB) as loader,
        pytest.raises(
            MemoryLimitError,
            match=re.escape("memory_limit=50.0 kB is too small for this graph: ")
            + r".*stages 'make' wait for room and nothing moves.*"
            "inside stages, as open batches and windows: .* Raise memory_limit, or make batches, windows or capacities smaller",
        ),
    ):
        list(loader)


def test_a_window_that_fits_passes():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(200))).then(block, name="make").then(ops.Shuffle(30))
    assert peak(graph, 50 * KB) <= 50 * KB


def test_branches_at_different_rates_grow_within_the_limit_and_beyond_it_are_an_error():
    def graph(size):
        made = pg.Graph("g")
        source = made.add(ops.FromIterable(range(120))).then(block, name="make", capacity=2)
        made.add(ops.Zip(), source.then(ops.Batch(size, collate=list), name="batches"), source)
        return made

    assert peak(graph(20), 200 * KB) <= 200 * KB
    with (
        graph(20).loader(memory_limit=60 * KB) as loader,
        pytest.raises(MemoryLimitError, match="make -> zip"),
    ):
        list(loader)


def test_bytes_of_a_queue_grow_where_branches_need_it():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(range(60))).then(block, name="make", capacity=64, max_bytes=2 * KB)
    graph.add(ops.Zip(), source.then(ops.Batch(20, collate=list)), source.then(lambda x: x, name="direct"))
    assert peak(graph, 200 * KB) <= 200 * KB


def test_buffers_shared_by_branches_count_once():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(range(40))).then(block, name="make", capacity=1)
    graph.add(ops.Zip(), *(source.then(lambda x: x, name=f"same{i}", capacity=1) for i in range(6)))
    with graph.loader(memory_limit=12 * KB) as loader:
        for one in loader:
            assert len(one) == 6
        assert loader._runtime.run.account.peak <= 12 * KB


def test_windows_that_get_the_same_sample_twice_release_it_twice():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(range(30))).then(block, name="make")
    graph.add(ops.Concat(), source, source).then(ops.Shuffle(7)).then(ops.Batch(2, collate=list))
    peak(graph, 500 * KB, epochs=2)


def test_what_is_skipped_filtered_or_dropped_is_released():
    def some(x):
        if x[0] % 5 == 0:
            raise ValueError
        return x

    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(range(100))).then(block, name="make", workers=2)
    node = node.then(some, name="some", on_error=pg.Skip(), workers=3).then(ops.Filter(lambda x: x[0] % 3))
    node = node.then(ops.FlatMap(lambda x: [x[:10], x[10:]])).then(ops.Batch(7, drop_last=True, collate=list))
    route = node.then(ops.Route(lambda b: len(b) % 2, 2))
    route[1].then(lambda x: x, name="odd")
    peak(graph, 200 * KB, epochs=2)


def test_queues_hold_at_most_their_capacity_while_the_consumer_is_slow():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(range(1000)), name="source", capacity=5)
    source.then(lambda x: x, name="map", workers=3, capacity=4)
    with graph.loader() as loader:
        items = iter(loader)
        next(items)
        run = loader._runtime.run
        (source_queue,), (terminal,) = run.stages["source"].outboxes[0], run.stages["map"].outboxes[0]
        wait_until(terminal, lambda s: s.depth > 4 or s.putters_waiting == 3)  # no worker can take more now
        wait_until(source_queue, lambda s: s.depth > 5 or s.putters_waiting == 1)
        assert source_queue.stats().depth <= 5
        assert terminal.stats().depth == 4
        # 1 delivered, 4 + 5 in queues, 3 in the workers' hands, 5 in the source's: as many as fit into its queue
        assert source_queue.stats().gets == 1 + 4 + 3
        assert source_queue.stats().puts <= 1 + 4 + 3 + 5


def test_views_count_with_their_own_extent_and_the_same_buffer_once():
    whole = np.zeros((4, 100), np.uint8)
    assert sum(n for _, n in buffers([whole, whole])) == 400
    assert sum(n for _, n in buffers([whole[0], whole[1]])) == 200
    assert buffers({"a": 1, "b": "text", "c": None}) == ()
    assert sum(n for _, n in buffers({"a": b"12345", "b": [bytearray(7)]})) == 12


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"key": "k", "text": t}, lambda t: [t, 1]])
def test_text_counts(wrap, batch):
    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(range(200)), capacity=64).then(
        lambda i: wrap(chr(97 + i % 26) * 10 * KB), name="make", capacity=64
    )
    if batch:
        node.then(ops.Batch(4, collate=list))
    assert 10 * KB < peak(graph, 200 * KB) <= 200 * KB


@pytest.mark.parametrize("batch", [False, True])
def test_short_text_counts_where_it_is_the_sample(batch):
    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(range(500)), capacity=64).then(
        lambda i: f"word {i:05}", name="make", capacity=64
    )
    if batch:
        node.then(ops.Batch(4, collate=list))
    assert sys.getsizeof("word 00000") <= peak(graph, 20 * KB) <= 20 * KB
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(500))).then(lambda i: f"word {i:05}").then(ops.Shuffle(500))
    with graph.loader(memory_limit=10 * KB) as loader, pytest.raises(MemoryLimitError, match="too small"):
        list(loader)


def test_short_text_in_a_sample_costs_nothing_and_wide_characters_count_in_full():
    assert buffers({"key": "short", "path": "/a/b"}) == ()
    assert buffers("\N{GRINNING FACE}" * 1000)[0][1] >= 4000


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("turn", range(3))
def test_a_few_times_the_largest_item_are_enough_for_expanding_stages_behind_each_other(depth, workers, turn):
    def some(x):
        yield from (part.copy() for part in np.array_split(x, 1 if workers == 4 else 2))

    limit = 6 * 8 * KB
    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(range(60)), capacity=64).then(
        lambda i: block(i, 8), name="make", workers=4, capacity=32
    )
    for level in range(depth):
        node = node.then(ops.FlatMap(some), name=f"flat{level}", workers=workers, capacity=32)
    with graph.loader(memory_limit=limit) as loader:
        assert sum(len(x) for x in loader) == 60 * 8 * KB


@pytest.mark.parametrize(
    "make", [lambda i: [f"word {j}" for j in range(1000)], lambda i: list(range(i, i + 1000))]
)
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"key": "k", "tokens": t}])
@pytest.mark.parametrize("batch", [False, True])
def test_long_lists_of_short_text_and_numbers_count(make, wrap, batch):
    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(range(200)), capacity=64).then(
        lambda i: wrap(make(i)), name="make", capacity=64
    )
    if batch:
        node.then(ops.Batch(4, collate=list))
    assert 8 * 4 * KB < peak(graph, 800 * KB) <= 800 * KB


def test_what_lies_in_long_containers_counts_however_it_is_nested():
    words = [f"word {i}" for i in range(1000)]
    least = 1000 * 49
    assert least < sum(n for _, n in buffers(words)) < 3 * least
    assert least < sum(n for _, n in buffers({"a": tuple(words)})) < 3 * least
    assert least < sum(n for _, n in buffers(dict(enumerate(words)))) < 3 * least
    assert least < sum(n for _, n in buffers([[word, 1] for word in words])) < 5 * least
    assert least < sum(n for _, n in buffers([{"a": word} for word in words])) < 8 * least
    assert buffers([words, words]) == buffers([words])
    array = np.zeros(10, np.uint8)
    assert (id(array), 10) in buffers([*words, array])


class Stack:
    """An iterator whose state is as large as what it holds."""

    def __init__(self, n, nbytes):
        self.at, self.n, self.nbytes = 0, n, nbytes

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at, "held": "x" * self.nbytes}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("batch", [False, True])
def test_states_of_iterators_count_and_stay_within_a_part_of_the_limit(batch):
    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(lambda: Stack(6400, 50 * KB)), capacity=64)
    node = node.then(ops.Shuffle(3200))
    if batch:
        node.then(ops.Batch(8))
    with graph.loader(memory_limit=1000 * KB) as loader:
        items = iter(loader)
        for _ in range(100):
            next(items)
        run = loader._runtime.run
        found = sum(len(s["held"]) for _, step, s, _ in run.snapshots["fromiterable"]._taken if step)
        assert 50 * KB <= found <= 1000 * KB // 8
        assert run.account.peak >= 50 * KB


def test_snapshots_of_a_stateful_operator_count():
    class Heavy(ops.Map):
        stateful = True

        def state_dict(self):
            return {"held": "x" * 50 * KB}

        def load_state_dict(self, state):
            assert len(state["held"]) == 50 * KB

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(1000))).then(Heavy(lambda x: x))
    assert 100 * KB <= peak(graph, 1000 * KB) <= 200 * KB
