"""Lineage, keys and random numbers: what a sample is, never who works on it."""

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.order import StridedOrder
from pipegraph.randomness import generator
from pipegraph.testing import assert_same_everywhere, fingerprint

pytestmark = pytest.mark.usefixtures("no_leaks")


def noise(x, rng):
    return rng.random(4)


def noisy(seed=0, **options):
    graph = pg.Graph("noisy", seed=seed)
    graph.add(ops.FromSequence(range(12)), name="source").then(noise, name="noise", **options)
    return graph


def draws(epoch=0, **options):
    with noisy(**options).loader() as loader:
        loader.set_epoch(epoch)
        return [fingerprint(each) for each in loader]


def test_random_numbers_do_not_depend_on_workers_or_backends():
    reference = draws(backend="inline")
    assert len(set(reference)) == 12
    assert draws(workers=1) == draws(workers=4) == draws(workers=3, capacity=1) == reference
    assert sorted(draws(workers=4, ordered=False)) == sorted(reference)


def test_seed_and_epoch_are_not_added():
    assert draws(seed=0, epoch=1) != draws(seed=1, epoch=0)
    assert not set(draws(seed=0, epoch=1)) & set(draws(seed=1, epoch=0))
    assert not set(draws(epoch=0)) & set(draws(epoch=1))


def test_random_numbers_do_not_depend_on_the_world_size():
    whole = draws()
    parts = []
    for rank in range(3):
        with noisy().loader(rank=rank, world_size=3) as loader:
            parts.append([fingerprint(each) for each in loader])
    assert [each for step in zip(*parts, strict=True) for each in step] == whole


def test_the_generator_is_keyed_by_seed_epoch_lineage_and_stage():
    with noisy(seed=9).loader() as loader:
        loader.set_epoch(4)
        chunk = list(loader.chunks())[7]
    expected = generator(9, 4, ("source", 7), "noise").random(4)
    assert np.array_equal(chunk.data, expected)


def test_children_append_their_index_and_batches_keep_their_rows():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(range(4)), name="s")
    children = source.then(ops.FlatMap(lambda x: [x] * x), name="children")
    grand = children.then(ops.FlatMap(lambda x: "ab"), name="grand")
    grand.then(ops.Batch(5, collate=list))
    with graph.loader() as loader:
        chunks = list(loader.chunks())
    rows = [row for chunk in chunks for row in chunk.lineages]
    assert rows == [("s", p, c, g) for p in range(4) for c in range(p) for g in range(2)]
    assert chunks[0].keys[:2] == ((1, 0, 0), (1, 0, 1))
    assert chunks[0].positions.dtype == np.int64
    assert chunks[0].positions.tolist() == [1, 1, 2, 2, 2]


def test_zip_takes_the_first_inputs_identity_and_other_fan_ins_keep_theirs():
    def rows(join):
        graph = pg.Graph("g")
        a = graph.add(ops.FromIterable("xy"), name="a")
        b = graph.add(ops.FromIterable("pq"), name="b")
        graph.add(join, a, b)
        with graph.loader() as loader:
            return [chunk.lineages[0] for chunk in loader.chunks()]

    assert rows(ops.Zip()) == [("a", 0), ("a", 1)]
    assert rows(ops.Concat()) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert sorted(rows(ops.Mix([1, 1], stop="all"))) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_samples_key_is_its_field_else_its_position_and_stays_when_the_field_is_dropped():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable([{"key": "k0", "x": 0}, {"x": 1}]))
    source.then(lambda s: s["x"], name="drop").then(ops.Batch(2))
    with graph.loader() as loader:
        assert next(loader.chunks()).keys == ("k0", 1)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_graph_of_random_functions_is_the_same_everywhere(ordered):
    def make():
        graph = pg.Graph("g", seed=5)
        node = graph.add(
            ops.FromSequence([np.arange(i + 1) for i in range(20)], order=StridedOrder(shuffle=True))
        )
        node = node.then(lambda x, rng: x + rng.integers(0, 99, x.shape), name="a", ordered=ordered)
        node.then(ops.FlatMap(lambda x, rng: [x, x * int(rng.integers(9))]), name="b").then(noise, name="c")
        return graph

    assert_same_everywhere(make)


def test_functions_get_their_own_containers_where_data_is_shared():
    samples = [{"x": [1, 2], "y": i} for i in range(6)]

    def grow(sample):
        sample["x"].append(sample.pop("y"))
        return sample

    def make():
        graph = pg.Graph("g")
        source = graph.add(ops.FromSequence(samples))
        graph.add(ops.Zip(), source.then(grow, name="a"), source.then(grow, name="b"), source)
        return graph

    with make().loader(epochs=2) as loader:
        for _ in range(2):
            assert list(loader) == [
                ({"x": [1, 2, i]}, {"x": [1, 2, i]}, {"x": [1, 2], "y": i}) for i in range(6)
            ]
    assert samples == [{"x": [1, 2], "y": i} for i in range(6)]
