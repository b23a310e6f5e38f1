"""Batches made below a completion-order stage and delivered by two ways: after a restart they are other batches."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from gates import Gate

import pipegraph as pg
from pipegraph import operators as ops


def build(first: int, collate: type | None) -> tuple[pg.Graph, Gate]:
    """Position ``first`` is the first to leave the completion-order stage, whatever the timing."""
    graph, gate = pg.Graph("two ways"), Gate()
    numbers = graph.add(ops.FromIterable(range(8)))
    gated = graph.add(gate, numbers, workers=8, ordered=False, name="gate")
    batches = gated.then(ops.Batch(2, collate=collate))
    graph.add(ops.Concat(), batches, batches, name="both")
    gate.release_position(first, 7 - first)
    return graph, gate


@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_each_sample_comes_once_by_each_way_though_it_meets_others(collate, stop):
    got: Counter[int] = Counter()
    graph, gate = build(0, collate)
    with graph.loader() as loader:
        for number, batch in enumerate(loader, 1):
            gate.release_all()
            got.update(int(x) for x in batch)
            state = json.dumps(loader.state_dict())
            if number == stop:
                break
    graph, gate = build(3, collate)
    with graph.loader() as loader:
        loader.load_state_dict(json.loads(state))
        gate.release_all()
        for chunk in loader.chunks():
            assert len(chunk) == len(chunk.data) == len(chunk.keys)
            got.update(int(x) for x in chunk.data)
    assert got == Counter(dict.fromkeys(range(8), 2))
