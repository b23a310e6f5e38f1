"""What a newcomer meets first: options that an editor completes, habits from elsewhere, and notebooks."""

from __future__ import annotations

from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g, n: n.then(abs, num_workers=4),
            r"Node.then\(\) has no num_workers=; here that is workers= of a stage",
        ),
        (
            lambda g, n: g.loader(batch_size=4),
            r"Graph.loader\(\) has no batch_size=; here that is the operator ops.Batch",
        ),
        (lambda g, n: g.loader(num_epochs=4), r"has no num_epochs=; here that is epochs= of graph.loader"),
        (
            lambda g, n: ops.FromSequence([1], num_workers=2),
            r"FromSequence\(\) has no num_workers=; here that is workers=",
        ),
        (
            lambda g, n: ops.Batch(batch_size=4),
            r"Batch\(\) has no batch_size=; here that is the operator ops.Batch\(size\)",
        ),
    ],
)
def test_an_argument_known_from_elsewhere_is_answered_with_ours(call: Any, message: str) -> None:
    graph = pg.Graph("habits")
    node = graph.add(ops.FromIterable(range(3)))
    with pytest.raises(TypeError, match=message):
        call(graph, node)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g, n: g.add(ops.FromIterable([1]), wrokers=2),
            r"^Graph.add\(\) has no wrokers=; did you mean workers=\?$",
        ),
        (lambda g, n: g.loader(epoch=2), r"^Graph.loader\(\) has no epoch=; did you mean epochs=\?$"),
        (
            lambda g, n: ops.Batch(2, droplast=True),
            r"^Batch\(\) has no droplast=; did you mean drop_last=\?$",
        ),
        (
            lambda g, n: ops.FromSequence([1], xyz=2),
            r"^FromSequence\(\) has no xyz=; it takes dataset, order",
        ),
        (
            lambda g, n: g.loader(n, 2),
            r"^Graph.loader\(\) takes 1 by position \(output\), got 2: give options by name$",
        ),
    ],
)
def test_a_misspelt_or_misplaced_argument_is_answered_with_the_right_one(call: Any, message: str) -> None:
    graph = pg.Graph("typo")
    with pytest.raises(TypeError, match=message):
        call(graph, graph.add(ops.FromIterable(range(3))))
