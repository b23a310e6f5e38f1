"""States continue over the same data, wherever it lies and however it was indexed."""

import itertools
import os
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import PipegraphWarning, StateError
from pipegraph.storage import build_manifest


def loader_of(parts: Any, **options: Any) -> Any:
    graph = pg.Graph("states", seed=3)
    select = ops.ShardSelect(parts, order=pg.order.LaneOrder(lanes=2), **options)
    graph.add(select, name="select").then(ops.Load(), name="load")
    return graph.loader()


def broken_off(parts: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A state after ten samples, and what is left."""
    with loader_of(parts, **options) as loader:
        samples = iter(loader)
        list(itertools.islice(samples, 10))
        return loader.state_dict(), list(samples)


def gone_on(state: Any, parts: Any, **options: Any) -> list[Any]:
    with loader_of(parts, **options) as loader:
        loader.load_state_dict(state)
        return list(loader)


def test_a_state_from_before_the_shards_were_indexed_continues(write_shards: Any) -> None:
    folder = write_shards("tar")
    state, rest = broken_off(folder)
    build_manifest(sorted(folder.glob("*.tar")), folder / "_manifest.json")
    assert gone_on(state, folder) == rest


def test_a_local_state_continues_in_a_store(write_shards: Any, upload: Any) -> None:
    folder = write_shards("tar")
    state, rest = broken_off(folder)
    build_manifest(sorted(folder.glob("*.tar")), folder / "_manifest.json")
    url = upload(folder)
    assert gone_on(state, f"{url}/*.tar") == rest
    assert gone_on(state, f"{url}/part-{{00..03}}.tar") == rest


def test_a_state_over_other_blocks_is_refused_with_the_manifest_that_was_found(
    write_shards: Any, make_manifest: Any
) -> None:
    folder = write_shards("tar")
    make_manifest(folder).save(folder / "_manifest.json")
    state, _ = broken_off(folder)
    (folder / "_manifest.json").unlink()
    with pytest.raises(
        StateError, match=r"'select'.*here it has the manifest, made from the headers.*4 blocks"
    ):
        gone_on(state, folder)
    make_manifest(folder, block_nbytes=9_000).save(folder / "_manifest.json")
    with pytest.raises(
        StateError,
        match=r"the manifest, '.*/_manifest\.json': <Manifest \w+: 4 parts, \d+ blocks, 126 samples",
    ):
        gone_on(state, folder)


def test_a_manifest_of_parts_that_have_other_sizes_now_is_not_used(write_shards: Any) -> None:
    folder = write_shards("jsonl")
    build_manifest(sorted(folder.glob("*.jsonl")), folder / "_manifest.json")
    with open(folder / "part-00.jsonl", "a") as shard:
        shard.write('{"key": "one more"}\n')
    os.utime(folder / "part-00.jsonl", (1, 1))
    with pytest.warns(PipegraphWarning, match="its manifest says"):
        assert len(loader_of(folder)) == 127
