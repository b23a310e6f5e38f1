"""Padding with masks and lengths, groups within a budget of tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError
from pipegraph.testing import assert_resumes_exactly

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


@settings(max_examples=6)
@given(st.lists(st.integers(0, 12), max_size=20), st.integers(12, 40))
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
