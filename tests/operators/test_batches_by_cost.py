"""``Batch(cost=, limit=)`` closes a batch where the next sample would not fit: none of them is full in a sure sense."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


def test_the_last_batch_is_delivered_with_cost():
    graph = pg.Graph()
    graph.add(ops.FromSequence([5, 5, 5, 5, 1])).then(ops.Batch(cost=lambda x: x, limit=10, drop_last=False))
    with graph.loader() as loader:
        assert [batch.tolist() for batch in loader] == [[5, 5], [5, 5], [1]]


def test_pack_refuses_drop_last_with_fit_for_its_rows_are_padded_anywhere():
    with pytest.raises(GraphError, match=r'Pack: drop_last=True needs method="split"'):
        ops.Pack(8, method="fit", drop_last=True)
