"""Local shards that are broken, missing a manifest, and what the stage's policy makes of them."""

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import PipegraphWarning, ShardError
from pipegraph.storage import build_manifest
from pipegraph.storage.formats.tar import TarFormat
from pipegraph.storage.shard_files import LocalFile

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


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_a_tar_cut_behind_a_whole_sample_does_not_pass_for_a_shorter_one(
    write_shards: Any, whole: int
) -> None:
    part = write_shards("tar", parts=1, samples=4) / "part-00.tar"
    with LocalFile(part) as file:
        samples = list(TarFormat().index(file, block_nbytes=1))
    part.write_bytes(part.read_bytes()[: samples[whole].offset])
    truncated = pytest.raises(ShardError, match="truncated: no end-of-archive marker")
    with loader_of(part) as loader, pytest.warns(PipegraphWarning, match="truncated"), truncated:
        list(loader)


def write_bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("order", [None, pg.order.StridedOrder(shuffle=True)], ids=repr)
def test_one_broken_block_of_four_can_be_left_out(write_shards: Any, order: Any) -> None:
    folder = write_shards("tar")
    build_manifest(f"{folder}/*.tar", folder / "_manifest.json")
    broken = folder / "part-01.tar"
    times = os.stat(broken)
    data = bytearray(broken.read_bytes())
    data[5000] ^= 1
    broken.write_bytes(data)
    os.utime(broken, ns=(times.st_atime_ns, times.st_mtime_ns))
    graph = pg.Graph("broken", seed=1)
    graph.add(ops.ShardSelect(folder, order=order or pg.order.LaneOrder())).then(
        ops.Load(), on_error=pg.Skip()
    )
    with graph.loader() as loader:
        keys = [sample["key"] for sample in loader]
        assert len(keys) == sum(30 + extra for extra in (0, 2, 3))
        assert not any(key.startswith("1-") for key in keys)


def test_shards_without_samples_are_said(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("LICENSE"))
    graph = pg.Graph("none")
    graph.add(ops.ShardSelect(tmp_path)).then(ops.Load())
    with graph.loader() as loader, pytest.warns(PipegraphWarning, match=r"'a\.tar' holds no samples"):
        assert list(loader) == []
