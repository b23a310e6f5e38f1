"""Local shards that are broken, missing a manifest, and what the stage's policy makes of them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import PipegraphWarning, ShardError
from pipegraph.storage import build_manifest

CUTS = {
    "tar": lambda data: data[: len(data) // 2],
    "npy": lambda data: data[100:],
    "parquet": lambda data: data[:-20],
    "jsonl.gz": lambda data: data[: len(data) // 2],
}


def loader_of(folder: Path, on_error: Any = "raise") -> Any:
    graph = pg.Graph("broken")
    select = ops.ShardSelect(folder, order=pg.order.LaneOrder(lanes=2, shuffle=False))
    graph.add(select, name="select").then(ops.Load(), name="load", on_error=on_error)
    return graph.loader()


@pytest.mark.parametrize("form", CUTS)
def test_one_broken_shard_is_left_to_the_policy(write_shards: Any, form: str) -> None:
    folder = write_shards(form)
    with loader_of(folder) as loader:
        whole = [repr(sample) for sample in loader]
    broken = folder / f"part-01.{form}"
    broken.write_bytes(CUTS[form](broken.read_bytes()))
    loader = loader_of(folder, pg.Skip(5))
    with pytest.warns(PipegraphWarning, match=rf"'part-01\.{form}' is broken"):
        left = list(map(repr, loader))
    loader.close()
    assert len(loader.profile().quarantined) == 1
    assert 30 + 32 + 33 <= len(left) < len(whole)
    assert set(left) <= set(whole)
    with loader_of(folder) as loader, pytest.raises(ShardError, match="part-01"):
        list(loader)


def test_a_broken_shard_is_refused_where_a_manifest_is_asked_for(write_shards: Any) -> None:
    folder = write_shards("tar")
    broken = folder / "part-01.tar"
    broken.write_bytes(CUTS["tar"](broken.read_bytes()))
    with pytest.raises(ShardError, match="part-01.tar: truncated"):
        build_manifest(sorted(folder.iterdir()))


def test_where_the_index_cannot_be_kept_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((7, 2)))
    (tmp_path / "file").touch()
    monkeypatch.setenv("PIPEGRAPH_CACHE", os.fspath(tmp_path / "file"))
    with pytest.warns(PipegraphWarning, match=r"cannot be kept in .*set PIPEGRAPH_CACHE"):
        assert len(loader_of(tmp_path / "a.npy")) == 7
