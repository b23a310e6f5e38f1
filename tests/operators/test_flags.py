"""What is True or False is no text and no number: ``"no"`` and ``"False"`` would count as True."""

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError, ReplicaError
from pipegraph.replicas import ReplicaExecutor
from pipegraph.storage.indexing import build_manifest

FLAGS = {
    "Batch: drop_last": lambda value: ops.Batch(3, drop_last=value),
    "MicroBatches: drop_last": lambda value: ops.MicroBatches(2, drop_last=value),
    "Pack: drop_last": lambda value: ops.Pack(8, drop_last=value),
    "CopyToDevice: copy": lambda value: ops.CopyToDevice("cpu", copy=value),
    "Scatter: copy": lambda value: ops.Scatter(["cpu"], copy=value),
    "ToDtype: scale": lambda value: ops.ToDtype(torch.float32, scale=value),
    "FromIterable: shard": lambda value: ops.FromIterable(range(3), shard=value),
    "Load: preload": lambda value: ops.Load(preload=value),
    "StridedOrder: shuffle": lambda value: pg.order.StridedOrder(shuffle=value),
    "StridedOrder: drop_last": lambda value: pg.order.StridedOrder(drop_last=value),
    "LaneOrder: shuffle": lambda value: pg.order.LaneOrder(shuffle=value),
    "PartOrder: shuffle": lambda value: pg.order.PartOrder(shuffle=value),
    "BlockOrder: shuffle": lambda value: pg.order.BlockOrder(shuffle=value),
    "BlockOrder: allow_duplicates": lambda value: pg.order.BlockOrder(allow_duplicates=value),
    "BlockOrder: compat": lambda value: pg.order.BlockOrder(compat=value),
    "autotune": lambda value: looped(autotune=value),
    "build_manifest: checksums": lambda value: build_manifest("part-0.tar", checksums=value),
    "record: ranges": lambda value: pg.record(looped(), ranges=value),
}


def looped(**options):
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(4)))
    return graph.loader(**options)


@pytest.mark.parametrize("value", ["no", 1])
@pytest.mark.parametrize("name", FLAGS)
def test_what_is_no_bool_is_refused_by_name(name, value):
    with pytest.raises(GraphError, match=f"^{name} must be True or False, got {value!r}$"):
        FLAGS[name](value)


@pytest.mark.parametrize("value", ["no", 0])
def test_equal_steps_is_a_bool_or_none(value):
    with pytest.raises(GraphError, match=f"^equal_steps must be True, False or None, got {value!r}$"):
        looped(equal_steps=value)


def test_the_flag_of_replicas_is_a_bool():
    with pytest.raises(
        ReplicaError, match="^ReplicaExecutor: deterministic must be True or False, got 'no'$"
    ):
        ReplicaExecutor(torch.nn.Linear(2, 2), ["cpu"], optimizer=torch.optim.SGD, deterministic="no")


@pytest.mark.parametrize("value", [True, False])
def test_a_bool_of_numpys_is_one(value):
    graph = pg.Graph()
    graph.add(ops.FromSequence(range(5))).then(ops.Batch(3, drop_last=np.bool_(value)))
    with graph.loader() as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2]] + [[3, 4]] * (not value)
