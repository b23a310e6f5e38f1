"""``Zip(strict=True)``: inputs of unequal lengths are an error, whichever is the shorter."""

from __future__ import annotations

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def zipped(*lengths, **options):
    graph = pg.Graph("zip")
    graph.add(
        ops.Zip(**options),
        *[graph.add(ops.FromIterable(range(n)), name=f"s{n}{i}") for i, n in enumerate(lengths)],
    )
    return graph.loader(epochs=2)


@pytest.mark.parametrize("lengths", [(3, 3), (0, 0), (2, 2, 2)])
def test_equal_lengths_end_in_peace_epoch_after_epoch(lengths):
    with zipped(*lengths, strict=True) as loader:
        for _ in range(2):
            assert len(list(loader)) == lengths[0]


@pytest.mark.parametrize(
    ("lengths", "short", "long"),
    [((3, 5), 0, 1), ((5, 3), 1, 0), ((3, 3, 4), 0, 2), ((3, 2, 3), 1, 0), ((0, 1), 0, 1)],
)
def test_unequal_lengths_are_an_error_that_names_the_inputs(lengths, short, long):
    got = []
    message = rf"Zip\(strict=True\): input {short} ended before input {long}"
    with zipped(*lengths, strict=True) as loader, pytest.raises(pg.errors.DataError, match=message):
        for item in loader:
            got.append(item)
    assert got == [(i,) * len(lengths) for i in range(len(got))] and len(got) <= min(lengths)


def test_without_it_the_shortest_ends_all():
    with zipped(3, 5) as loader:
        assert list(loader) == [(0, 0), (1, 1), (2, 2)]


def test_it_is_true_or_false():
    with pytest.raises(pg.errors.GraphError, match="strict must be True or False"):
        ops.Zip(strict="yes")


def test_the_plan_says_what_shifts_the_pairs():
    graph = pg.Graph("zip")
    numbers = graph.add(ops.FromSequence(range(9)), name="numbers", on_error=pg.Skip())
    halves = numbers.then(lambda x: x / 2, name="halves", on_error=pg.Skip())
    graph.add(ops.Zip(), numbers, halves, name="pairs")
    assert "pairs: pairs items by their order: what 'halves' leaves out (Skip) shifts one input" in str(
        graph.plan()
    )
    assert "'numbers' leaves out" not in str(graph.plan())
