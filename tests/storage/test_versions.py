"""Bytes of two versions of a part never meet, and the cache gives those of the version that is asked for."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipegraph.errors import DataError, StoreError
from pipegraph.storage import NodeCache
from pipegraph.storage.block_bytes import BlockBytes
from pipegraph.storage.formats import Block
from pipegraph.storage.object_file import identify, open_part
from pipegraph.storage.parts import Part, expand_parts
from pipegraph.storage.stores import StoreClient

Connect = Callable[..., StoreClient]
SIZE = 1_000_000  # of the object that the fixture `url` writes
OLD, NEW = random.Random(0).randbytes(SIZE), random.Random(1).randbytes(SIZE)
WHOLE = Block(0, SIZE, 0, 1)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    with NodeCache(tmp_path / "cache", "10 MB") as cache:
        yield cache


def read(part: Part, **options: Any) -> bytes:
    with BlockBytes(**options).open(part, WHOLE) as file:
        return file.read_at(0, SIZE)


def test_an_object_that_was_replaced_does_not_come_from_the_cache_as_it_was(
    s3_port: int, connect: Connect, url: str, cache: NodeCache
) -> None:
    assert read(Part(url), store=connect(s3_port), cache=cache) == OLD
    connect(s3_port).put(url, NEW)
    assert read(Part(url), store=connect(s3_port), cache=cache) == NEW
    assert len(os.listdir(Path(cache.folder) / "objects")) == 1


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


def test_a_listed_object_that_is_replaced_before_it_is_read_is_an_error(
    s3_port: int, connect: Connect, url: str
) -> None:
    (part,) = expand_parts(url.replace("object.bin", "*.bin"), store=connect(s3_port))
    connect(s3_port).put(url, NEW)
    with pytest.raises(StoreError, match="was replaced"):
        read(part, store=connect(s3_port))


def test_a_local_file_that_was_overwritten_does_not_come_from_the_cache_as_it_was(
    tmp_path: Path, cache: NodeCache
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(OLD)
    assert read(Part(str(path)), cache=cache) == OLD
    path.write_bytes(NEW)
    os.utime(path, ns=(1, 1))  # whatever the clock says
    assert read(Part(str(path)), cache=cache) == NEW


def test_a_local_part_that_is_written_again_is_refused(tmp_path: Path, cache: NodeCache) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(OLD)
    (part,) = expand_parts(path)
    path.write_bytes(NEW)
    os.utime(path, ns=(1, 1))
    for options in ({}, {"cache": cache}):
        with pytest.raises(DataError, match=r"a\.tar': was written again since it was looked up"):
            BlockBytes(**options).open(part, WHOLE)
    with pytest.raises(DataError, match="was written again"):
        open_part(part)
    assert read(identify(Part(str(path)))) == NEW
