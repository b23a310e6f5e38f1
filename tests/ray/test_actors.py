"""Stages whose operators live in Ray actors: the same data, errors and policies as everywhere, and no actor left."""

import os
import time

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError, StageTimeoutError
from pipegraph.testing.outcome import placed, run_pass

pytestmark = pytest.mark.usefixtures("cluster")


def pipeline(fn, items=range(20), workers=2, backend="ray", **options):
    graph = pg.Graph("g", seed=3)
    source = graph.add(ops.FromSequence(items))
    graph.add(ops.Map(fn), source, name="work", workers=workers, backend=backend, **options)
    return graph


def outcome(graph, **options):
    with graph.loader(**options) as loader:
        return run_pass(loader)


def test_every_kind_of_stage_delivers_what_it_delivers_inline():
    def draw(x, rng):
        return {"key": x["key"], "x": float(rng.random()), "t": torch.rand(3)}

    def make():
        graph = pg.Graph("g", seed=3)
        items = [{"key": f"k{i}", "v": np.full(2000, i)} for i in range(23)]
        read = graph.add(ops.FromSequence(items, shuffle=True), name="read")
        drawn = read.then(ops.Map(draw), name="draw")
        twice = drawn.then(ops.FlatMap(lambda x: [x] * (x["x"] < 0.8)), name="twice")
        twice.then(ops.Batch(4), name="batch")
        return graph

    assert outcome(placed(make(), "ray", 1)) == outcome(placed(make(), "inline", 1))


def test_what_a_function_is_given_may_be_written_to():
    def change(sample):
        sample["array"][0] = -1
        sample["tensor"][0] = -1
        return sample

    items = [{"array": np.arange(50_000), "tensor": torch.arange(50_000)} for _ in range(3)]
    graph = pg.Graph("g")
    copies = graph.add(ops.FromIterable(lambda: iter(items)))
    copies.then(change, name="work", backend="ray")
    with graph.loader() as loader:
        for sample in loader:
            assert sample["array"][0] == -1 == sample["tensor"][0]
    assert items[0]["array"][0] == 0


def test_a_sample_that_ends_its_actor_is_blamed_and_the_others_are_delivered():
    graph = pipeline(lambda x: os._exit(3) if x == 13 else x, on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert list(loader) == [x for x in range(20) if x != 13]
        (lost,) = loader.profile().quarantined
    assert lost.key == 13
    assert "the worker's actor has died: The actor is dead because its worker process has died" in lost.error


def test_an_item_that_takes_too_long_fails_with_its_stack():
    def hang(x):
        if x == 13:
            time.sleep(100)
        return x

    with pipeline(hang, timeout=1.0).loader() as loader:
        found = []
        with pytest.raises(
            StageTimeoutError, match=r"longer than timeout=1 s; its actor was ended"
        ) as caught:
            found.extend(loader)
    assert found == list(range(13))
    assert "in hang" in "".join(caught.value.__notes__)


def test_actors_that_there_is_no_room_for_join_later_and_nobody_waits_for_them(cluster):
    graph = pipeline(lambda x: (x, os.getpid()), range(40), workers=3, backend=pg.Ray({"num_cpus": 8}))
    with graph.loader(epochs=2) as loader:
        found = list(loader)
        assert [x for x, _ in found] == list(range(40))
        assert len({pid for _, pid in found}) <= 2


def test_a_resource_that_no_node_has_is_refused():
    graph = pipeline(lambda x: x, backend=pg.Ray({"num_gpu": 1}))
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match=r"stage 'work': no node .*\['num_gpu'\].* num_gpus"),
    ):
        next(iter(loader))


def test_ctrl_c_ends_the_pass_and_leaves_no_actor(live_actors):
    def interrupted():
        with pipeline(lambda x: x).loader() as loader:
            next(iter(loader))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not live_actors()


def test_no_actor_is_left(live_actors):
    for ends in (list, lambda loader: next(iter(loader))):
        with pipeline(lambda x: x).loader() as loader:
            ends(loader)
            assert live_actors()  # one or both: an epoch may be over before the second has begun
        assert not live_actors()
