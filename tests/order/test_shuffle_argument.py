"""``shuffle=`` of the sources that have an order: the same words, the same meaning."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops

MAKE = {
    "FromSequence": lambda **options: ops.FromSequence(range(50), **options),
    "ListFiles": lambda **options: ops.ListFiles("folder", **options),
    "ShardSelect": lambda **options: ops.ShardSelect("part-{0..3}.tar", **options),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("shuffle", [True, False])
def test_shuffle_says_whether_the_default_order_shuffles(name, shuffle):
    made = MAKE[name](shuffle=shuffle)
    assert type(made.order) is type(MAKE[name]().order)
    assert made.order.shuffle is shuffle


def test_a_shuffled_epoch_has_every_sample_once_in_another_order_each_time():
    graph = pg.Graph("g", seed=3)
    graph.add(ops.FromSequence(range(50), shuffle=True))
    with graph.loader(epochs=2) as loader:
        first, second = list(loader), list(loader)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != sorted(first)
