"""Stores that fail, through whole pipelines: every sample once with the right bytes, or a clear error, and never a hang."""

import errno
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.storage import Manifest, stores
from pipegraph.storage.requests import Backoff
from pipegraph.storage.stores import StoreClient
from pipegraph.testing import Resources

QUICK = Backoff(deadline_s=300, first_s=0.005, max_s=0.05)


@pytest.fixture(autouse=True)
def quick_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store clients that ask again sooner than those of real runs, and give up only what stalls on purpose."""
    grace_s = 3 if "stall" in request.node.name else 60
    monkeypatch.setattr(
        stores,
        "StoreClient",
        lambda options=None, **more: StoreClient(options, **more, retry=QUICK, grace_s=grace_s),
    )


class Bucket:
    """Shards on the S3-compatible server, and what a pipeline needs to read them."""

    def __init__(self, folder: Path, manifest: Manifest, root: str) -> None:
        self.folder, self.manifest, self.root = folder, manifest, root

    def graph(self, options: dict[str, Any], load: ops.Load, on_error: Any = "raise") -> pg.Graph:
        graph = pg.Graph("faults", seed=1)
        order = pg.order.LaneOrder(lanes=4)
        names = f"{self.root}/part-{{00..02}}.tar"
        select = ops.ShardSelect(names, order=order, manifest=self.manifest, store=options)
        graph.add(select, name="select").then(load, name="load", workers=2, on_error=on_error)
        return graph

    def expected(self) -> list[Any]:
        graph = pg.Graph("faults", seed=1)
        select = ops.ShardSelect(self.folder, order=pg.order.LaneOrder(lanes=4), manifest=self.manifest)
        graph.add(select, name="select").then(ops.Load(), name="load")
        with graph.loader() as loader:
            return list(loader)


@pytest.fixture
def bucket(
    write_shards: Any, make_manifest: Any, s3_port: int, connect: Any, request: pytest.FixtureRequest
) -> Bucket:
    folder = write_shards("tar", 3, 25)
    root = f"s3://data/{request.node.name.partition('[')[0]}"
    for path in folder.iterdir():
        connect(s3_port).put(f"{root}/{path.name}", path.read_bytes())
    return Bucket(folder, make_manifest(folder, block_nbytes=8_000), root)


def a_fifth(fault: str, proxy: Any) -> Callable[[str, str], str]:
    """A fault for every fifth read, but of one range at most two: more loads of a block would exceed its tries."""
    reads, spoiled = itertools.count(), Counter[tuple[str, str]]()

    def choose(method: str, path: str) -> str:
        place = path, proxy.range
        if method != "GET" or next(reads) % 5 != 2 or spoiled[place] == 2:
            return ""
        spoiled[place] += 1
        return fault

    return choose


@pytest.mark.parametrize(
    "cached", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["memory", "cache"]
)
@pytest.mark.parametrize(
    "fault", ["503", "cut", "drop", "flip", pytest.param("stall", marks=pytest.mark.slow)]
)
def test_a_fifth_of_all_requests_may_fail(
    bucket: Bucket, proxy: Any, s3_options: Any, tmp_path: Path, fault: str, cached: bool
) -> None:
    proxy.fault = a_fifth(fault, proxy)
    cache = pg.NodeCache(tmp_path / "cache", "1 MB") if cached else None
    with bucket.graph(s3_options(proxy.port), ops.Load(cache=cache)).loader() as loader:
        assert list(loader) == bucket.expected()
    assert any(seen == fault for _, _, seen in proxy.seen)
    if cache is not None:
        assert not list((tmp_path / "cache" / "partial").iterdir())


@pytest.mark.parametrize("cached", [False, True], ids=["memory", "cache"])
def test_closing_while_every_request_hangs_leaves_nothing(
    bucket: Bucket, proxy: Any, s3_options: Any, tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "StoreClient", StoreClient)  # that of real runs would wait for minutes
    asked = threading.Event()

    def late(method: str, path: str) -> str:
        asked.set()
        return "late"

    proxy.fault = late
    cache = pg.NodeCache(tmp_path / "cache", "1 MB") if cached else None
    before = Resources.now()
    loader = bucket.graph(s3_options(proxy.port), ops.Load(cache=cache)).loader()
    failure: list[BaseException] = []

    def consume() -> None:
        try:
            list(loader)
        except BaseException as error:
            failure.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert asked.wait(20)
    loader.close()
    consumer.join(20)
    assert "closed" in str(failure[0])
    assert not [leak for leak in Resources.now().leaked_since(before) if "pipegraph" in leak]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_or_quota_reads_through_memory(
    number: int,
    bucket: Bucket,
    s3_port: int,
    s3_options: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    cache = pg.NodeCache(tmp_path / "cache", "1 MB")
    with bucket.graph(s3_options(s3_port), ops.Load(cache=cache)).loader() as loader:
        assert list(loader) == bucket.expected()
    assert cache.usage() == 0
