"""Fetched blocks: the same samples from place, cache and memory."""

import errno
import io
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pipegraph.errors import ChecksumError
from pipegraph.storage.block_bytes import BlockBytes, cacheable
from pipegraph.storage.formats import Sample, format_of
from pipegraph.storage.indexing import build_manifest
from pipegraph.storage.manifest import Manifest
from pipegraph.storage.node_cache import NodeCache
from pipegraph.storage.part_files import identify
from pipegraph.storage.parts import Part
from pipegraph.storage.shard_files import LocalFile
from pipegraph.storage.stores import StoreClient

BLOCK = 20_000


@pytest.fixture(params=["a.tar", "a.parquet", "a.jsonl"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A part of some ten blocks."""
    rng, path = random.Random(0), tmp_path / request.param
    if request.param == "a.tar":
        with tarfile.open(path, "w") as archive:
            for i in range(200):
                info = tarfile.TarInfo(f"{i}.jpg")
                info.size = 900
                archive.addfile(info, io.BytesIO(rng.randbytes(900)))
    elif request.param == "a.parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"x": [rng.randbytes(900) for _ in range(200)]}), path, row_group_size=20)
    else:
        path.write_text("".join(f'{{"x": "{rng.randbytes(450).hex()}"}}\n' for _ in range(200)))
    return path


@pytest.fixture
def manifest(data: Path) -> Manifest:
    return build_manifest(data, block_nbytes=BLOCK)


@pytest.fixture
def remote(data: Path) -> Part:
    url = f"memory://blocks/{data.name}"
    with StoreClient() as store:
        store.put(url, data.read_bytes())
    return Part(url, data.stat().st_size)


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOENT, errno.EACCES, errno.EIO, errno.ENOSPC])
def test_a_cache_that_cannot_be_used_any_more_is_passed_by(data: Path, manifest: Manifest, code: int) -> None:
    class Gone:
        def fetch(self, what: Any, download: Any) -> Any:
            raise OSError(code, os.strerror(code))

    assert samples(Part(str(data)), manifest, cache=Gone()) == samples(Part(str(data)), manifest)


def samples(part: Part, manifest: Manifest, **how: Any) -> list[Sample]:
    found = []
    blocks = BlockBytes(**how)
    for number in range(manifest.blocks):
        block = manifest.block(number)[1]
        with blocks.open(part, block, manifest.block_checksum(number)) as file:
            found += format_of(part).read(file, block)[:]
    return found


def test_blocks_are_the_same_from_place_memory_and_cache(
    data: Path, manifest: Manifest, remote: Part, tmp_path: Path
) -> None:
    assert manifest.blocks > 5
    with LocalFile(data) as file:
        expected = list(format_of(data.name).samples(file))
    local = manifest.parts[0]
    assert samples(local, manifest) == expected
    with StoreClient() as store, NodeCache(tmp_path / "cache", "1 MB") as cache:
        assert samples(remote, manifest, store=store) == expected
        for _ in range(2):
            assert samples(remote, manifest, store=store, cache=cache) == expected
            assert samples(local, manifest, cache=cache) == expected
        assert cache.counts["misses"] == cache.counts["hits"] == 2 * manifest.blocks
        remote = identify(remote, store)
        assert all(
            cacheable(remote, manifest.block(n)[1], manifest.block_checksum(n)) in cache
            for n in range(manifest.blocks)
        )


def test_a_local_block_read_in_place_is_checked_where_the_manifest_has_a_checksum(
    data: Path, manifest: Manifest
) -> None:
    block = manifest.block(2)[1]
    raw = bytearray(data.read_bytes())
    raw[block.offset + block.nbytes // 2] ^= 1
    data.write_bytes(raw)
    part, crc = manifest.parts[0], manifest.block_checksum(2)
    with pytest.raises(
        ChecksumError, match=rf"{data.name}, bytes {block.offset}\.\..*should be .*index again"
    ):
        BlockBytes().open(part, block, crc)
    BlockBytes().open(part, manifest.block(1)[1], manifest.block_checksum(1)).close()
    BlockBytes().open(part, block).close()
