"""Bytes of two versions of a part never meet, and the cache gives those of the version that is asked for."""

import os
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipegraph.errors import DataError, StoreError
from pipegraph.storage import NodeCache
from pipegraph.storage.formats import Block
from pipegraph.storage.object_file import identify, open_part
from pipegraph.storage.open_blocks import open_block
from pipegraph.storage.parts import Part, expand_parts
from pipegraph.storage.stores import StoreClient
from pipegraph.storage.versions import ObjectInfo

Connect = Callable[..., StoreClient]
SIZE = 1_000_000  # of the object that the fixture `url` writes
OLD, NEW = random.Random(0).randbytes(SIZE), random.Random(1).randbytes(SIZE)
WHOLE = Block(0, SIZE, 0, 1)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    with NodeCache(tmp_path / "cache", "10 MB") as cache:
        yield cache


def read(part: Part, **options: Any) -> bytes:
    with open_block(part, WHOLE, **options) as file:
        return file.read_at(0, SIZE)


def test_an_object_that_was_replaced_does_not_come_from_the_cache_as_it_was(
    s3_port: int, connect: Connect, url: str, cache: NodeCache
) -> None:
    assert read(Part(url), store=connect(s3_port), cache=cache) == OLD
    connect(s3_port).put(url, NEW)
    assert read(Part(url), store=connect(s3_port), cache=cache) == NEW
    assert len(os.listdir(Path(cache.folder) / "objects")) == 1


def test_a_cached_object_is_asked_for_its_version_only(
    proxy: Any, connect: Connect, url: str, cache: NodeCache
) -> None:
    read(Part(url), store=connect(proxy.port), cache=cache)
    proxy.seen.clear()
    store = connect(proxy.port)
    for _ in range(3):
        assert read(Part(url), store=store, cache=cache) == OLD
    assert [method for method, _, _ in proxy.seen] == ["HEAD"]
    (listed,) = connect(s3_port_of(proxy)).list(url[: -len("object.bin")])
    read(listed, store=connect(proxy.port), cache=cache)
    assert len(proxy.seen) == 1


def s3_port_of(proxy: Any) -> int:
    port: int = proxy._upstream
    return port


def test_an_object_replaced_while_its_ranges_are_fetched_is_an_error(
    proxy: Any, s3_port: int, connect: Connect, url: str
) -> None:
    other, reads = connect(s3_port), iter(range(1000))

    def replaced_at_the_third(method: str, path: str) -> str:
        if method == "GET" and next(reads) == 2:
            other.put(url, NEW)
        return ""

    proxy.fault = replaced_at_the_third
    store = connect(proxy.port, range_nbytes=100_000, parallel=2)
    with pytest.raises(StoreError, match="the object was replaced while it was in use"):
        read(Part(url), store=store)
    assert read(Part(url), store=connect(s3_port)) == NEW


def test_ranges_asked_for_together_are_of_one_version(
    proxy: Any, s3_port: int, connect: Connect, url: str
) -> None:
    # All are sent before any answer has said which version there is.
    other, reads = connect(s3_port), iter(range(1000))

    def replaced_at_the_last(method: str, path: str) -> str:
        if method == "GET" and next(reads) == 3:
            other.put(url, NEW)
        return ""

    proxy.fault = replaced_at_the_last
    store = connect(proxy.port, range_nbytes=250_000, parallel=4)
    try:
        assert read(Part(url), store=store) in (OLD, NEW)
    except StoreError as error:
        assert "was replaced" in str(error)  # noqa: PT017


def test_blocks_of_one_part_are_of_one_version(s3_port: int, connect: Connect, url: str) -> None:
    store = connect(s3_port)
    open_block(Part(url, SIZE), Block(0, 1000, 0, 1), store=store).close()
    connect(s3_port).put(url, NEW)
    with pytest.raises(StoreError, match="was replaced"):
        open_block(Part(url, SIZE), Block(1000, 1000, 1, 1), store=store)


def test_a_listed_object_that_is_replaced_before_it_is_read_is_an_error(
    s3_port: int, connect: Connect, url: str
) -> None:
    (part,) = expand_parts(url.replace("object.bin", "*.bin"), store=connect(s3_port))
    connect(s3_port).put(url, NEW)
    with pytest.raises(StoreError, match="was replaced"):
        read(part, store=connect(s3_port))


def test_another_size_than_the_manifest_says_is_an_error_at_the_first_block(
    s3_port: int, connect: Connect, url: str
) -> None:
    connect(s3_port).put(url, NEW + b"more")
    with pytest.raises(DataError, match=f"has {SIZE + 4} bytes, its manifest says {SIZE}; it was changed"):
        read(Part(url, SIZE), store=connect(s3_port))


def test_what_a_client_writes_itself_is_read_by_it(s3_port: int, connect: Connect, url: str) -> None:
    store = connect(s3_port)
    assert store.read(url, 0, SIZE) == OLD
    store.put(url, NEW)
    assert store.read(url, 0, SIZE) == NEW


def test_a_local_file_that_was_overwritten_does_not_come_from_the_cache_as_it_was(
    tmp_path: Path, cache: NodeCache
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(OLD)
    assert read(Part(str(path)), cache=cache) == OLD
    path.write_bytes(NEW)
    os.utime(path, ns=(1, 1))  # whatever the clock says
    assert read(Part(str(path)), cache=cache) == NEW


def test_a_local_part_written_over_in_place_with_its_old_time_is_fetched_again(
    tmp_path: Path, cache: NodeCache
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(OLD)
    before = os.stat(path)
    assert read(Part(str(path)), cache=cache) == OLD
    write_in_place(path, NEW, before)
    assert read(Part(str(path)), cache=cache) == NEW


def write_in_place(path: Path, data: bytes, before: os.stat_result) -> None:
    """As ``rsync --inplace --times`` does. The change time alone shows it, at the next tick of the file system's clock."""
    while os.stat(path).st_ctime_ns == before.st_ctime_ns:
        with open(path, "r+b") as file:
            file.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(path)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


def test_a_link_to_a_local_part_is_no_change_of_it(tmp_path: Path, cache: NodeCache) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(OLD)
    (part,) = expand_parts(path)
    os.link(path, tmp_path / "b.tar")
    path.chmod(0o600)
    assert read(part) == read(part, cache=cache) == OLD


def test_files_of_the_same_relative_name_in_two_folders_are_two(
    tmp_path: Path, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in (("one", OLD), ("two", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(data)
        monkeypatch.chdir(tmp_path / name)
        assert read(Part("a.bin"), cache=cache) == data
    monkeypatch.chdir(tmp_path / "one")
    assert read(Part("a.bin"), cache=cache) == OLD
    assert cache.stats.hits == 1


def test_a_local_part_that_is_written_again_is_refused(tmp_path: Path, cache: NodeCache) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(OLD)
    (part,) = expand_parts(path)
    path.write_bytes(NEW)
    os.utime(path, ns=(1, 1))
    for options in ({}, {"cache": cache}):
        with pytest.raises(DataError, match=r"a\.tar': was written again since it was looked up"):
            open_block(part, WHOLE, **options)
    with pytest.raises(DataError, match="was written again"):
        open_part(part)
    assert read(identify(Part(str(path)))) == NEW


def test_stores_without_etags_tell_versions_by_their_times() -> None:
    meta = {"size": 5, "e_tag": None, "last_modified": datetime(2026, 1, 1, tzinfo=UTC)}
    later = {**meta, "last_modified": datetime(2026, 1, 2, tzinfo=UTC)}
    assert ObjectInfo.of(meta) != ObjectInfo.of(later)
    assert ObjectInfo.of({**meta, "last_modified": datetime(1970, 1, 1, tzinfo=UTC)}).version == ""
