"""engine/stage/ledger.py: what was quarantined stays, and states stay small."""

import json
import sys
from itertools import islice

import pytest
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.stage.ledger import KEPT
from pipegraph.loader.delivered import FORGET_EVERY
from pipegraph.order import BlockOrder, StridedOrder
from tests.engine.breaking_stages import breaks, make

pytestmark = pytest.mark.usefixtures("no_leaks")


def reachable(thing):
    """How many objects of the project's and of containers a thing leads to."""
    seen, waiting = {}, [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset) or type(each).__name__ == "deque":
            waiting += list(each)
        elif type(each).__module__.startswith("pipegraph."):
            waiting += [
                getattr(each, name) for name in getattr(type(each), "__slots__", ()) if hasattr(each, name)
            ]
            waiting += list(vars(each).values()) if hasattr(each, "__dict__") else []
    return len(seen)


def steps_of(call):
    """How many lines of Python a call takes: what it walks, whatever the machine does beside."""
    steps = 0

    def count(frame, event, argument):
        nonlocal steps
        steps += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


def test_short_epochs_leave_nothing_in_the_ledger_but_what_was_quarantined():
    graph = make(breaks(3), 100, on_error=pg.Skip(5))
    sizes = []
    with graph.loader(epochs=12) as loader:
        for _ in range(12):
            assert len(list(loader)) == 99
            sizes.append(reachable(loader._ledger))
        assert len(loader.profile().quarantined) == 12
    assert sizes[-1] - sizes[2] < 9 * 100  # nine entries more, not 900 items


def test_few_large_batches_do_not_pile_up_the_cursors_of_their_samples():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(40_000)), name="source").then(
        breaks(3), name="work", on_error=pg.Skip()
    ).then(ops.Batch(1000, collate=len))
    with graph.loader() as loader:
        peak = max(reachable(loader._ledger) for _ in loader)
    assert peak < 3 * 30_000


def test_a_state_costs_the_same_however_much_was_quarantined():
    def cost(bad):
        with make(breaks(*range(bad)), bad + 300, on_error=pg.Skip()).loader() as loader:
            items = iter(loader)
            for _ in range(3):
                next(items)
            loader.state_dict()
            return steps_of(loader.state_dict)

    few, many = cost(200), cost(4000)
    assert many < few + 100


def test_a_state_costs_the_same_however_many_failures_lie_ahead_of_it():
    passed = []

    def work(x):
        passed.append(x)
        if 3 <= x < 3000:
            raise ValueError(x)
        return x

    with make(work, 3010, on_error=pg.Skip()).loader() as loader:
        items = iter(loader)
        next(items)
        wait_until(loader._crew.run.terminal, lambda stats: stats.puts >= 4)
        assert len(passed) >= 3000  # far ahead of what was delivered
        assert steps_of(loader.state_dict) < 1000
        assert loader.state_dict()["rank0"]["ledger"][1] == []


def test_a_state_between_passes_shows_the_last_of_all_epochs_before():
    with make(breaks(*range(0, 100, 2)), 100, on_error=pg.Skip()).loader(epochs=3) as loader:
        for _ in range(3):
            list(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    count, lines = state["rank0"]["ledger"]
    assert count == 150
    assert [(line[2], line[0]) for line in lines] == [(1, x) for x in range(72, 100, 2)] + [
        (2, x) for x in range(0, 100, 2)
    ]
    with make(breaks(*range(0, 100, 2)), 100, on_error=pg.Skip()).loader(epochs=4) as loader:
        loader.load_state_dict(state)
        assert len(loader.profile().quarantined) == 64
        list(loader)
        assert len(loader.profile().quarantined) == 64 + 50


# -- samples below completion-order stages -------------------------------------------------------------


ORDERS = [
    StridedOrder(shuffle=True),
    BlockOrder(shuffle=True),
    BlockOrder(shuffle=False),
    BlockOrder(shuffle=True, compat=True),
]


def unordered(order, items=4000, rank=0, world_size=1):
    graph = pg.Graph("unordered", seed=5)
    graph.add(ops.FromSequence(range(items), order=order), name="source").then(
        lambda x: x, name="work", workers=3, capacity=4, ordered=False
    )
    return graph.loader(rank=rank, world_size=world_size)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_state_below_a_completion_order_stage_stays_bounded(order, rank):
    with unordered(order, rank=rank, world_size=2) as loader:
        peak = 0
        for number, _ in enumerate(loader):
            if number % 97 == 0:
                peak = max(peak, len(json.dumps(loader.state_dict())))
        assert number == 1999
    assert peak < 6000


def test_what_was_delivered_is_forgotten_also_where_nobody_takes_a_state():
    with unordered(BlockOrder()) as loader:
        peak = 0
        for _ in loader:
            peak = max(peak, sum(map(len, loader._progress.place.delivered.read()[1].values())))
    assert peak < 2 * FORGET_EVERY


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("stop", [1, 140, 399, 400])
def test_what_was_delivered_out_of_order_is_not_delivered_again(order, stop):
    with unordered(order, 800, rank=1, world_size=2) as loader:
        whole = sorted(loader)
    with unordered(order, 800, rank=1, world_size=2) as loader:
        first = list(islice(loader, stop))
        state = json.loads(json.dumps(loader.state_dict()))
    for _ in range(2):
        with unordered(order, 800, rank=1, world_size=2) as loader:
            loader.load_state_dict(state)
            second = list(islice(loader, min(100, 400 - stop)))
            state_later = json.loads(json.dumps(loader.state_dict()))
    with unordered(order, 800, rank=1, world_size=2) as loader:
        loader.load_state_dict(state_later)
        assert sorted(first + second + list(loader)) == whole


# -- bounds ------------------------------------------------------------------------------------------


def test_of_many_that_were_left_out_all_are_counted_and_the_last_kept():
    bad, epochs = 2 * KEPT, 3
    sizes = []
    with make(lambda x: 1 // (x % 4), 4 * bad, on_error=pg.Skip()).loader() as loader:
        for epoch in range(epochs):
            before = loader.profile()
            assert sum(1 for _ in loader) == 3 * bad
            profile = loader.profile()
            assert profile.quarantined_count == (epoch + 1) * bad
            assert loader.profile(since=before).quarantined_count == bad
            assert [q.key for q in profile.quarantined] == list(range(4 * bad - 4 * KEPT, 4 * bad, 4))
            assert {q.epoch for q in profile.quarantined} == {epoch}
            assert f"quarantined: {profile.quarantined_count:,}" in str(profile)
            sizes.append(reachable(loader._ledger))
        assert max(sizes) < 12 * KEPT


def test_within_an_epoch_too_only_the_last_entries_are_kept():
    peak = 0
    with make(lambda x: 1 // (x % 2), 60_000, on_error=pg.Skip()).loader() as loader:
        for number, _ in enumerate(loader):
            if number % 5_000 == 4_999:
                peak = max(peak, reachable(loader._ledger))
    assert loader.profile().quarantined_count == 30_000
    assert peak < 40 * KEPT  # not 30,000 entries of five objects


def fails_if_odd(n):
    if n % 2:
        raise ValueError(n)
    return n


@pytest.mark.parametrize("cut", [0, 1, 15, 20])
def test_the_count_goes_on_after_a_resume_with_more_entries_than_a_state_holds(cut):
    def loader():
        graph = pg.Graph("g", seed=1)
        source = graph.add(ops.FromSequence(range(400)), name="src")
        source.then(fails_if_odd, name="f", on_error=pg.Skip(200)).then(ops.Batch(10), name="batch")
        return graph.loader(epochs=1)  # no epoch is read ahead, whose failures count when they happen

    with loader() as before:
        batches = iter(before)
        samples = sum(len(next(batches)) for _ in range(cut))
        state = json.loads(json.dumps(before.state_dict()))
    with loader() as after:
        after.load_state_dict(state)
        lost = after.profile().quarantined_count
        # Behind the last delivered sample may lie a failed one.
        assert lost in (samples, samples - 1)
        assert after.state_dict()["rank0"]["ledger"][0] == lost
        again = iter(after)
        next(again, None)
        assert after.state_dict()["rank0"]["ledger"][0] <= lost + 10
        for _ in again:
            pass
        assert after.profile().quarantined_count == 200
        assert 'pipegraph_quarantined_total{graph="g"} 200.0' in after.metrics()
        for _ in after:
            pass
        assert after.profile().quarantined_count == 400
        assert after.state_dict()["rank0"]["ledger"][0] == 400
