"""engine/stage/ledger.py: what was quarantined stays, and states stay small."""

import json
from itertools import islice

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.order import BlockOrder, StridedOrder

pytestmark = pytest.mark.usefixtures("no_leaks")


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
