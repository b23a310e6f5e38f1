"""Objects in a store as shard files: read ahead, or by ranges."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipegraph.storage.formats import format_of
from pipegraph.storage.indexing import build_manifest
from pipegraph.storage.node_cache import Cacheable, NodeCache
from pipegraph.storage.part_files import RemoteFile, open_part
from pipegraph.storage.parts import Part
from pipegraph.storage.requests import Backoff
from pipegraph.storage.shard_files import LocalFile, crc32c_extend
from pipegraph.storage.stores import StoreClient

Connect = Callable[..., StoreClient]
MakeTar = Callable[..., Path]

QUICK = Backoff(deadline_s=300, first_s=0.01, max_s=0.05)
DATA = random.Random(0).randbytes(1_000_000)


@pytest.fixture
def shard(
    make_tar: MakeTar, s3_port: int, connect: Connect, request: pytest.FixtureRequest
) -> tuple[Path, Part]:
    rng = random.Random(1)
    path = make_tar([(f"{i:04d}.{f}", rng.randbytes(rng.randrange(3000))) for i in range(150) for f in "ab"])
    url = f"s3://data/{request.node.name}/a.tar"
    connect(s3_port).put(url, path.read_bytes())
    return path, Part(url, path.stat().st_size)


def test_a_remote_tar_reads_like_a_local_one(
    shard: tuple[Path, Part], s3_port: int, connect: Connect
) -> None:
    path, part = shard
    tar, store = format_of(part), connect(s3_port, range_nbytes=20_000, parallel=4)
    with LocalFile(path) as local, open_part(part, store) as remote:
        assert list(tar.samples(local)) == list(tar.samples(remote))
        requests = store.counts["requests"]
        assert requests <= 2 + part.size // 20_000 + 4  # type: ignore[operator]
        blocks = list(tar.index(local, 50_000))
        assert blocks == list(tar.index(remote, 50_000))
        for block in reversed(blocks):
            assert tar.read(local, block)[:] == tar.read(remote, block)[:]


def test_reading_in_order_asks_for_each_byte_once(s3_port: int, connect: Connect, url: str) -> None:
    store = connect(s3_port, range_nbytes=50_000, parallel=4)
    with RemoteFile(Part(url), store) as file:
        data = b"".join(file.read_at(at, min(7777, 1_000_000 - at)) for at in range(0, 1_000_000, 7777))
    assert data == DATA
    assert (store.counts["requests"], store.counts["nbytes"]) == (21, 1_000_000)


@pytest.mark.parametrize("keep", [0, 300_000])
def test_any_pattern_of_reads_gives_the_right_bytes(
    s3_port: int, connect: Connect, url: str, keep: int
) -> None:
    store, rng = connect(s3_port, range_nbytes=30_000, parallel=3), random.Random(keep)
    with RemoteFile(Part(url), store, keep_nbytes=keep) as file:
        at = 0
        for _ in range(60):
            nbytes = rng.choice([0, 1, 512, 30_000, 100_000])
            at = min(rng.choice([at, at + 100, rng.randrange(1_000_000)]), 1_000_000 - nbytes)
            assert file.read_at(at, nbytes) == DATA[at : at + nbytes]
            at += nbytes


def test_a_manifest_of_remote_parts_reads_each_byte_once(
    shard: tuple[Path, Part], s3_port: int, connect: Connect
) -> None:
    path, part = shard
    store = connect(s3_port, range_nbytes=20_000)
    remote = build_manifest([part], store=store, block_nbytes=50_000)
    assert remote == build_manifest([path], block_nbytes=50_000)
    assert remote.block_crc32c.tolist() == build_manifest([path], block_nbytes=50_000).block_crc32c.tolist()
    assert store.counts["nbytes"] == part.size


def cacheable(url: str, offset: int, nbytes: int) -> Cacheable:
    return Cacheable(url, nbytes, offset, crc32c=crc32c_extend()(0, DATA[offset : offset + nbytes]))


def test_with_a_fifth_of_all_requests_spoiled_every_byte_arrives_right(
    proxy: Any, connect: Connect, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect(proxy.port, retry=QUICK, grace_s=600, range_nbytes=20_000)
    requests = store._requests
    in_time = requests._in_time

    async def in_its_time(wait: Any) -> Any:
        # What stalls is soon given up; a request that only takes its time, on a busy machine, is counted below.
        stalls = bool(proxy.seen) and proxy.seen[-1][2] == "stall" and not store.counts["stalled"]
        requests._grace = 0.1 if stalls else 600
        return await in_time(wait)

    monkeypatch.setattr(requests, "_in_time", in_its_time)
    rng = random.Random(5)
    faults = ["503", "drop", "cut", "flip"]
    stalls = iter(["stall"])
    proxy.fault = lambda method, path: next(stalls, rng.choice(faults)) if rng.random() < 0.2 else ""
    with NodeCache(tmp_path, 1_000_000) as cache:
        for start in range(0, 1_000_000, 20_000):
            what = cacheable(url, start, 20_000)
            with cache.fetch(what, lambda write, at=start: store.download(url, at, 20_000, write)) as file:
                assert file.read_at(0, 20_000) == DATA[start : start + 20_000]
            assert cache.usage() == start + 20_000
        flipped = sum(f == "flip" for _, _, f in proxy.seen)
        assert cache.counts["corrupt"] == flipped > 0
    assert {f for _, _, f in proxy.seen} == {"", "stall", *faults}
