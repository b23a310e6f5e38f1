"""Local shards that are broken, with and without a manifest."""

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
def test_one_broken_shard_is_an_error_that_names_it(write_shards: Any, form: str) -> None:
    folder = write_shards(form)
    broken = folder / f"part-01.{form}"
    broken.write_bytes(CUTS[form](broken.read_bytes()))
    with loader_of(folder, pg.Skip()) as loader, pytest.raises(ShardError, match="part-01"):
        list(loader)


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
