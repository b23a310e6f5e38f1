"""Hostile and broken shards at the end of a pipeline, under each error policy."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError

GOOD = 12


def add(archive: tarfile.TarFile, name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data) if kind == tarfile.REGTYPE else 0
    info.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    archive.addfile(info, io.BytesIO(data))


def good_shard(path: Path, number: int) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(GOOD):
            add(archive, f"{number}-{i}.txt", b"%d" % i)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shards"
    made.mkdir()
    good_shard(made / "a.tar", 0)
    good_shard(made / "c.tar", 2)
    return made


@pytest.mark.parametrize("policy", ["raise", pg.Skip(0.9), pg.Retry(1, then=pg.Skip(0.9))], ids=repr)
def test_a_shard_that_changed_after_it_was_indexed_follows_the_policy(folder: Path, policy: Any) -> None:
    good_shard(folder / "b.tar", 1)
    select = ops.ShardSelect(folder, order=pg.order.LaneOrder(shuffle=False))
    select.manifest()
    data = bytearray((folder / "b.tar").read_bytes())
    for at in range(3 * 1024, 4 * 1024):  # two headers
        data[at] = 0xFF
    (folder / "b.tar").write_bytes(data)
    graph = pg.Graph("changed", seed=2)
    graph.add(select, name="select").then(ops.Load(), name="load", on_error=policy)
    with graph.loader() as loader:
        if policy == "raise":
            with pytest.raises(DataError, match=r"b\.tar"):
                list(loader)
            return
        keys = [sample["key"] for sample in loader]
        failed = len(loader.profile().quarantined)
    assert failed == GOOD
    assert keys == [f"{n}-{i}" for n in (0, 2) for i in range(GOOD)]
