"""Shards that are read where a source's workers are: planned for actors, and read here by worker processes."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import ChecksumError
from pipegraph.operators import shard_rows
from pipegraph.operators.shard_rows import ShardRows
from pipegraph.testing.outcome import run_pass


def shards(folder, load=None, **select):
    graph = pg.Graph("g", seed=3)
    parts = graph.add(ops.ShardSelect(f"{folder}/*.tar", **select), name="shards")
    return parts.then(load or ops.Load(), name="load", workers=2, backend="ray")


def as_planned(graph):
    """What actors would do, in worker processes."""
    plan = graph.plan()
    source = plan.stages["shards"].operator
    assert isinstance(source, ShardRows)
    made = pg.Graph("g", seed=3)
    made.add(source, name="shards", workers=2, backend="process").then(ops.Batch(4))
    return made


def test_workers_read_what_the_trainer_would_in_the_same_order(write_shards, make_manifest):
    folder = write_shards("tar")
    for manifest in (None, make_manifest(folder)):
        node = shards(folder, manifest=manifest).then(ops.Batch(4))
        with as_planned(node.graph).loader() as loader:
            found = run_pass(loader)
        here = pg.Graph("g", seed=3)
        here.add(ops.ShardSelect(f"{folder}/*.tar", manifest=manifest), name="shards").then(ops.Load()).then(
            ops.Batch(4)
        )
        with here.loader() as loader:
            assert run_pass(loader) == found


def test_a_worker_keeps_few_blocks_at_hand(write_shards, monkeypatch):
    folder = write_shards("tar")
    plan = shards(folder).graph.plan()
    source = plan.stages["shards"].operator
    with as_planned(shards(folder).then(ops.Batch(4)).graph).loader() as loader:
        expected = [sample for batch in loader for sample in batch["key"]]
    monkeypatch.setattr(shard_rows, "BLOCKS", 1)
    source.open(pg.Context("shards", seed=3))
    source.begin_run(0, ())
    found, most = [], 0
    for position in source.positions(0, 0, 1, 0):
        found.append(source.read(position, 0)["key"])
        most = max(most, len(source._blocks))
    source.close()
    assert (found, most) == (expected, 1)


def test_states_of_both_are_of_the_same_graph(write_shards):
    folder = write_shards("tar")
    actors = shards(folder).graph.plan()
    here = pg.Graph("g", seed=3)
    here.add(ops.ShardSelect(f"{folder}/*.tar"), name="shards").then(ops.Load(), name="load")
    assert here.plan().digests() == actors.digests()


def test_a_broken_block_is_refused_where_it_is_read(write_shards, make_manifest):
    folder = write_shards("tar")
    manifest = make_manifest(folder)
    part = sorted(folder.glob("*.tar"))[0]
    whole = bytearray(part.read_bytes())
    whole[600] ^= 1
    with part.open("r+b") as file:
        file.write(whole)
    graph = as_planned(shards(folder, manifest=manifest).graph)
    with graph.loader() as loader, pytest.raises(ChecksumError, match=part.name):
        list(loader)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: shards(folder, ops.Load(cache=pg.NodeCache(folder / "cache", limit="1 MB"))),
        lambda folder: shards(folder, order=pg.order.PartOrder()),
        lambda folder: shards(folder).then(ops.Cache("1 MB")),
    ],
)
def test_what_workers_share_is_read_in_the_trainer(make, write_shards):
    plan = make(write_shards("tar")).graph.plan()
    assert isinstance(plan.stages["shards"].operator, ops.ShardSelect)
    assert "load: runs in a thread: load works on the trainer's own" in str(plan)


def test_remote_shards_and_folders_are_read_in_the_trainer(tmp_path):
    for parts in ("s3://bucket/a-{000..003}.tar", "part-{0..3}.parquet", tmp_path):
        graph = pg.Graph("g")
        graph.add(ops.ShardSelect(parts), name="shards").then(ops.Load(), backend="ray")
        assert isinstance(graph.plan().stages["shards"].operator, ops.ShardSelect)
