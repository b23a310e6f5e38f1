"""Bytes that arrive in pieces: gaps, overlaps and checksums are noticed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipegraph.errors import ChecksumError, DataError
from pipegraph.storage.entries import Cacheable, Sink
from pipegraph.storage.node_cache import NodeCache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    with NodeCache(tmp_path, 10_000) as cache:
        yield cache


def files(cache: NodeCache) -> list[str]:
    return sorted(
        p.name for f in ("objects", "partial", "quarantine") for p in (Path(cache.folder) / f).iterdir()
    )


def test_too_few_bytes_are_noticed_without_a_checksum(cache: NodeCache) -> None:
    with pytest.raises(ChecksumError, match="999 of 1000 bytes came"):
        cache.fetch(Cacheable("u", 1000), lambda sink: sink.write_at(0, b"x" * 999))


def test_a_gap_in_a_download_is_noticed_without_a_checksum(cache: NodeCache) -> None:
    def gap(sink: Sink) -> None:
        sink.write_at(0, b"x" * 400)
        sink.write_at(401, b"x" * 599)

    with pytest.raises(ChecksumError, match="400 of 1000 bytes came"):
        cache.fetch(Cacheable("u", 1000), gap)


def test_bytes_outside_the_entry_are_refused(cache: NodeCache) -> None:
    for offset in (-1, 1):
        with pytest.raises(DataError, match="of an entry of 1000"):
            cache.fetch(Cacheable("u", 1000), lambda sink, at=offset: sink.write_at(at, b"x" * 1000))  # type: ignore[misc]
    assert files(cache) == []


def test_pieces_that_overlap_in_part_are_refused(cache: NodeCache) -> None:
    def overlap(sink: Sink) -> None:
        sink.write_at(0, b"x" * 600)
        sink.write_at(500, b"x" * 500)

    with pytest.raises(DataError, match="from 500 to 600 in pieces that overlap"):
        cache.fetch(Cacheable("u", 1000), overlap)
    assert files(cache) == []
