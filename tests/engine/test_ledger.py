"""engine/stage/ledger.py: what was quarantined stays, and states stay small."""

import json
from itertools import islice

import pytest

import pipegraph as pg
from pipegraph import operators as ops
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


def test_short_epochs_leave_nothing_in_the_ledger_but_what_was_quarantined():
    graph = make(breaks(3), 100, on_error=pg.Skip(5))
    sizes = []
    with graph.loader(epochs=12) as loader:
        for _ in range(12):
            assert len(list(loader)) == 99
            sizes.append(reachable(loader._ledger))
        assert len(loader.profile().quarantined) == 12
    assert sizes[-1] - sizes[2] < 9 * 100  # nine entries more, not 900 items


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
