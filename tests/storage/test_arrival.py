"""Bytes that arrive in pieces: those that are missing are noticed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipegraph.errors import ChecksumError
from pipegraph.storage.entries import Cacheable, Sink
from pipegraph.storage.node_cache import NodeCache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    with NodeCache(tmp_path, 10_000) as cache:
        yield cache


def test_too_few_bytes_are_noticed_without_a_checksum(cache: NodeCache) -> None:
    with pytest.raises(ChecksumError, match="999 of 1000 bytes came"):
        cache.fetch(Cacheable("u", 1000), lambda sink: sink.write_at(0, b"x" * 999))


def test_a_gap_in_a_download_is_noticed_without_a_checksum(cache: NodeCache) -> None:
    def gap(sink: Sink) -> None:
        sink.write_at(0, b"x" * 400)
        sink.write_at(401, b"x" * 599)

    with pytest.raises(ChecksumError, match="999 of 1000 bytes came"):
        cache.fetch(Cacheable("u", 1000), gap)
