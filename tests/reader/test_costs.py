"""What states and restarts cost: the time of the thread itself, since the machine may be busy."""

import json
from time import thread_time
from typing import Any

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.storage import Manifest, Part
from pipegraph.storage.formats import Block
from pipegraph.storage.manifest import PartIndex


def graph_of(folder: Any, manifest: Manifest) -> pg.Graph:
    graph = pg.Graph("costs", seed=1)
    select = ops.ShardSelect(folder, order=pg.order.LaneOrder(lanes=24), manifest=manifest)
    graph.add(select, capacity=64).then(ops.Load(), workers=2, capacity=64).then(ops.Batch(32, collate=list))
    return graph


def test_a_state_takes_a_few_kilobytes(write_shards: Any, make_manifest: Any) -> None:
    folder = write_shards("npy", 4, 2_000)
    with graph_of(folder, make_manifest(folder, block_nbytes=50_000)).loader() as loader:
        batches = iter(loader)
        for _ in range(100):
            next(batches)
            state = loader.state_dict()
    assert len(json.dumps(state)) < 2_000


def test_a_restart_late_in_the_epoch_reads_no_more_than_an_early_one(
    write_shards: Any, make_manifest: Any
) -> None:
    folder = write_shards("npy", 4, 5_000)
    manifest = make_manifest(folder, block_nbytes=50_000)
    loaded = []
    for steps in (2, 300, 600):
        with graph_of(folder, manifest).loader() as loader:
            batches = iter(loader)
            for _ in range(steps):
                next(batches)
            state = loader.state_dict()
        with graph_of(folder, manifest).loader() as loader:
            loader.load_state_dict(state)
            next(iter(loader))
            profile = loader.profile()
            loaded.append((profile.stages["load"].counters["blocks loaded"], profile.stages["load"].items))
    # As many as there are lanes, a few more where a lane has just begun another block; and what the queues take.
    assert all(blocks <= 48 for blocks, _ in loaded), loaded
    assert all(items <= 512 for _, items in loaded), loaded


def test_an_epoch_of_billions_of_samples_is_entered_anywhere_in_a_moment() -> None:
    """2.5 billion samples in 16,000 parts of 16 blocks: dealing from the middle costs what it does from the start."""
    blocks = tuple(Block(i * 10**9, 10**9, i * 9_766, 9_766) for i in range(16))
    parts = [PartIndex(Part(f"part-{i:05}.tar", 16 * 10**9), blocks) for i in range(16_000)]
    manifest = Manifest.of(parts)
    assert len(manifest) > 2.4e9
    select = ops.ShardSelect([index.part for index in parts], manifest=manifest)
    from pipegraph.contracts import Context

    select.open(Context("select", rank=5, world_size=16))
    select.manifest()
    next(select.positions(0, 5, 16, 0))
    took = []
    for start in (0, 10**6, 10**8, 1_500_000):
        started = thread_time()
        dealt = select.positions(0, 5, 16, start)
        samples = [select.read(next(dealt), 0) for _ in range(64)]
        took.append(thread_time() - started)
        assert len({sample.number for sample in samples}) >= 15
    assert min(took[1:]) < 20 * took[0] + 0.05
    assert min(took) < 0.1
