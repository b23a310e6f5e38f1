"""Promise 1: what waits stays within ``memory_limit``, and no bound ever locks a graph up."""

import threading

import numpy as np
import pytest
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import MemoryLimitError

pytestmark = pytest.mark.usefixtures("no_leaks")

KB = 1000


def block(i, kilobytes=1):
    return np.full(kilobytes * KB, i % 250, np.uint8)


def wait_until_empty(run):
    """Blocks until nothing is counted: a fan-in whose epoch has ended reads what its other inputs still bring."""
    account, empty = run.account, threading.Event()
    remove = account._remove

    def removed(buffers):
        remove(buffers)
        if account.used == 0:
            empty.set()

    with account._lock:
        account._remove = removed  # called under the lock at every release
        if account.used == 0:
            empty.set()
    assert empty.wait(60), account.used


def whole(graph, limit, epochs=1):
    """Runs it, sees that everything arrives and is released; returns the most that was alive."""
    with graph.loader(epochs=epochs, memory_limit=limit) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass
        run = loader._crew.run
        wait_until_empty(run)
        return run.account.peak


@pytest.mark.parametrize("workers", [1, 4])
def test_what_waits_in_queues_stays_within_the_limit_and_what_is_worked_on_comes_on_top(workers):
    graph = pg.Graph("g")
    node = graph.add(ops.FromIterable(range(300)), capacity=64).then(
        block, name="make", workers=workers, capacity=64
    )
    node.then(lambda x: x.copy(), name="copy", workers=workers, capacity=64)
    with graph.loader(memory_limit=30 * KB) as loader:
        passing = iter(loader)
        next(passing)
        run = loader._crew.run
        wait_until(run.terminal, lambda stats: stats.putters_waiting == workers)
        wait_until(run.channels["copy", 0], lambda stats: stats.putters_waiting == workers)
        queued = sum(channel.stats().nbytes for channel in run.channels.values())
        assert 10 * KB < queued <= 30 * KB
        assert run.account.used <= 30 * KB + 3 * workers * KB
        assert len(list(passing)) == 299


@pytest.mark.parametrize("turn", range(5))
def test_many_workers_behind_a_small_limit_never_lock_up(turn):
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(300)), capacity=64).then(
        block, name="make", workers=6, capacity=64
    ).then(lambda x: x + 1, name="add", workers=5, capacity=64).then(ops.Batch(3))
    whole(graph, 24 * KB, epochs=2)


def test_an_item_larger_than_its_queues_share_or_the_limit_still_passes():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(8))).then(lambda i: block(i, 15), name="make").then(
        lambda x: x[:5], name="small"
    )
    whole(graph, 10 * KB)


@pytest.mark.parametrize("make", [lambda: ops.Shuffle(100), lambda: ops.Batch(100, collate=list)])
def test_a_limit_too_small_for_a_window_is_a_clear_error_and_no_deadlock(make):
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(200))).then(block, name="make").then(make(), name="window")
    with (
        graph.loader(memory_limit=50 * KB) as loader,
        pytest.raises(
            MemoryLimitError,
            match="stage 'window': its open batch or window of 51.0 kB is larger than memory_limit=50.0 kB; raise",
        ),
    ):
        list(loader)


def test_branches_at_different_rates_grow_within_the_limit_and_beyond_it_are_an_error():
    def graph(size):
        made = pg.Graph("g")
        source = made.add(ops.FromIterable(range(120))).then(block, name="make", capacity=2)
        made.add(ops.Zip(), source.then(ops.Batch(size, collate=list), name="batches"), source)
        return made

    whole(graph(20), 200 * KB)
    with (
        graph(20).loader(memory_limit=60 * KB) as loader,
        pytest.raises(MemoryLimitError, match="make -> zip"),
    ):
        list(loader)


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
    whole(graph, 200 * KB, epochs=2)


def test_queues_hold_at_most_their_capacity_while_the_consumer_is_slow():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(range(1000)), name="source", capacity=5)
    source.then(lambda x: x, name="map", workers=3, capacity=4)
    with graph.loader() as loader:
        items = iter(loader)
        next(items)
        run = loader._crew.run
        (source_queue,), (terminal,) = run.stages["source"].outboxes[0], run.stages["map"].outboxes[0]
        wait_until(terminal, lambda s: s.depth > 4 or s.putters_waiting == 3)  # no worker can take more now
        wait_until(source_queue, lambda s: s.depth > 5 or s.putters_waiting == 1)
        assert source_queue.stats().depth <= 5
        assert terminal.stats().depth == 4
        # 1 delivered, 4 + 5 in queues, 3 in the workers' hands, 5 in the source's: as many as fit into its queue
        assert source_queue.stats().gets == 1 + 4 + 3
        assert source_queue.stats().puts <= 1 + 4 + 3 + 5
