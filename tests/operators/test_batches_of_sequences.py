"""Padding with masks and lengths, groups within a budget of tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError
from pipegraph.testing import assert_resumes_exactly, assert_same_everywhere

pytestmark = pytest.mark.usefixtures("no_leaks")


def chain(items, *operators, **options):
    graph = pg.Graph("g", seed=2)
    node = graph.add(ops.FromIterable(items))
    for operator in operators:
        node = node.then(operator)
    with graph.loader(**options) as loader:
        return list(loader)


# -- padding -----------------------------------------------------------------------------------------

KINDS = {
    "lists": lambda n: list(range(1, n + 1)),
    "arrays": lambda n: np.arange(1, n + 1),
    "tensors": lambda n: torch.arange(1, n + 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_lengths_come_with_lists_arrays_and_tensors(kind):
    samples = [{"ids": KINDS[kind](n), "name": "x"} for n in (3, 0, 1)]
    pad = {"ids": ops.Pad(-1, mask="attention_mask", lengths=True)}
    (batch,) = chain(samples, ops.Batch(3, pad=pad))
    assert batch["ids"].tolist() == [[1, 2, 3], [-1] * 3, [1, -1, -1]] and batch["ids"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert batch["ids_length"].tolist() == [3, 0, 1] and batch["ids_length"].dtype == torch.int64
    assert batch["name"] == ["x"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_chosen_and_one_pad_serves_all_ragged_fields(kind):
    samples = [{"a": KINDS[kind](n), "b": KINDS[kind](n + 1), "n": n} for n in (2, 2)]
    (batch,) = chain(samples, ops.Batch(2, pad=ops.Pad(mask=True, multiple_of=4)))
    assert batch["a"].shape == batch["b"].shape == batch["a_mask"].shape == (2, 4)
    assert batch["b_mask"].sum().item() == 6 and batch["n"].tolist() == [2, 2]
    (batch,) = chain(samples, ops.Batch(2, pad={"a": ops.Pad(to=5), "b": ops.Pad(to=3)}))
    assert batch["a"].shape == (2, 5) and batch["b"].shape == (2, 3)
    with pytest.raises(DataError, match="field 'b': a sample of 3 entries in a batch padded to 2"):
        chain(samples, ops.Batch(2, pad={"a": ops.Pad(to=5), "b": ops.Pad(to=2)}))


def test_wrong_arguments_are_named():
    for arguments, message in [
        ({"value": "x"}, "value must be a number"),
        ({"mask": 1}, "mask must be True, False or the name"),
        ({"to": 0}, "to must be an int >= 1"),
        ({"multiple_of": 2.0}, "multiple_of must be an int >= 1"),
        ({"to": 3, "multiple_of": 2}, "to or multiple_of, not both"),
    ]:
        with pytest.raises(GraphError, match=message):
            ops.Pad(**arguments)


def test_a_padded_batch_is_taken_apart_row_by_row():
    samples = [{"ids": [1, 2]}, {"ids": [3]}]
    back = chain(samples, ops.Batch(2, pad=ops.Pad(mask=True, lengths=True)), ops.Unbatch())
    assert [(s["ids"].tolist(), s["ids_mask"].tolist(), int(s["ids_length"])) for s in back] == [
        ([1, 2], [True, True], 2),
        ([3, 0], [True, False], 1),
    ]


# -- buckets with a budget -----------------------------------------------------------------------------


def bucketed(lengths, limit=20, boundaries=(4, 8), batch=True):
    def make():
        graph = pg.Graph("g", seed=3)
        items = [[i] * n for i, n in enumerate(lengths)]
        node = graph.add(ops.FromSequence(items, shuffle=True)).then(lambda x: x, workers=2)
        node = node.then(ops.Bucket(len, boundaries, cost=len, limit=limit), name="bucket")
        if batch:
            node.then(ops.Batch(cost=len, limit=limit, collate=list))
        return graph

    return make


def test_a_group_leaves_when_the_next_sample_does_not_fit():
    items = [[0] * n for n in (3, 9, 2, 3, 9, 1, 3)]
    found = chain(items, ops.Bucket(len, [5], cost=len, limit=9), ops.Batch(cost=len, limit=9, collate=list))
    assert [[len(x) for x in batch] for batch in found] == [[9], [3, 2, 3, 1], [3], [9]]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 12), max_size=40), st.integers(12, 40))
def test_every_batch_is_of_one_bucket_within_the_budget_and_resumes_exactly(lengths, limit):
    make = bucketed(lengths, limit)
    with make().loader() as loader:
        batches = list(loader)
    assert sorted(x[0] for b in batches for x in b if x) == [i for i, n in enumerate(lengths) if n]
    assert sum(len(b) for b in batches) == len(lengths)
    for batch in batches:
        assert sum(map(len, batch)) <= limit
        assert len({(len(x) >= 4) + (len(x) >= 8) for x in batch}) == 1
    assert_resumes_exactly(make, epochs=1)
    assert_resumes_exactly(bucketed(lengths, limit, batch=False), epochs=1)


def test_a_budget_is_the_same_everywhere():
    assert_same_everywhere(bucketed([5 * i % 11 for i in range(40)]))


def test_what_costs_too_much_and_wrong_arguments_are_named():
    with pytest.raises(DataError, match="Bucket: one sample costs 9, more than limit=8"):
        chain([[0] * 9], ops.Bucket(len, [5], cost=len, limit=8))
    for arguments, message in [
        ({"cost": len}, "cost and limit go together"),
        ({"limit": 4}, "cost and limit go together"),
        ({"cost": len, "limit": 4, "size": 3}, "size, or cost with limit, not both"),
        ({"cost": 3, "limit": 4}, "cost must be a function"),
    ]:
        with pytest.raises(GraphError, match=message):
            ops.Bucket(len, [5], **arguments)
