"""Local shards that are broken, missing a manifest, and what the stage's policy makes of them."""

import tarfile
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import PipegraphWarning, ShardError

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
    loader = loader_of(folder, pg.Skip())
    with pytest.warns(PipegraphWarning, match=rf"'part-01\.{form}' is broken"):
        left = list(map(repr, loader))
    loader.close()
    assert len(loader.profile().quarantined) == 1
    assert 30 + 32 + 33 <= len(left) < len(whole)
    assert set(left) <= set(whole)
    with loader_of(folder) as loader, pytest.raises(ShardError, match="part-01"):
        list(loader)
    for budget in (5, 0.5):  # 15 samples would count as one
        with loader_of(folder, pg.Skip(budget)) as loader, pytest.raises(ShardError) as caught:
            list(loader)
        assert any("nobody knows how many samples are lost" in note for note in caught.value.__notes__)


def write_bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_shards_without_samples_are_said(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("LICENSE"))
    graph = pg.Graph("none")
    graph.add(ops.ShardSelect(tmp_path)).then(ops.Load())
    with graph.loader() as loader, pytest.warns(PipegraphWarning, match=r"'a\.tar' holds no samples"):
        assert list(loader) == []
