"""Shards that are read in actors: only what is made of them comes to the trainer."""

import io
import json
import os
import tarfile

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing.outcome import placed, run_pass

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def shards(tmp_path):
    for shard in range(3):
        with tarfile.open(tmp_path / f"part-{shard}.tar", "w") as archive:
            for number in range(20):
                info = tarfile.TarInfo(f"{shard}-{number:02}.txt")
                info.size = 1000
                archive.addfile(info, io.BytesIO(b"%d" % number * 1000))
    return f"{tmp_path}/part-*.tar"


def pipeline(shards, died):
    def work(sample):
        if sample["key"] == "1-07" and not died.exists():
            died.touch()
            os._exit(1)
        return {"key": sample["key"], "length": len(sample["txt"])}

    graph = pg.Graph("g", seed=3)
    read = graph.add(ops.ShardSelect(shards)).then(ops.Load(), workers=2, backend="ray")
    read.then(work, name="work", workers=2, backend="ray").then(ops.Batch(4))
    return graph


def test_shards_read_in_actors_give_what_they_give_inline(shards, tmp_path):
    died = tmp_path / "died"
    graph = pipeline(shards, died)
    assert "the actors of 'shardselect' read the shards" in str(graph.plan())
    with graph.loader() as loader:
        found = run_pass(loader).chunks
    assert died.exists()
    inline = placed(graph, "inline", 1)
    with inline.loader() as loader:
        assert run_pass(loader).chunks == found
    for first, second in ((graph, inline), (inline, graph)):
        with first.loader() as loader:
            chunks = loader.chunks()
            for _ in range(6):
                next(chunks)
            state = json.dumps(loader.state_dict())
        with second.loader() as loader:
            loader.load_state_dict(json.loads(state))
            assert run_pass(loader).chunks == found[6:]
