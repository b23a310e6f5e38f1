"""The node cache: one download per entry, nothing half-read, never over its limit."""

import errno
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipegraph.errors import ChecksumError, DataError
from pipegraph.storage.node_cache import DOWNLOADS, Cacheable, NodeCache, Write
from pipegraph.storage.shard_files import crc32c_extend


def content(number: int, nbytes: int = 1000) -> bytes:
    return bytes([number % 251]) * nbytes


def entry(number: int, nbytes: int = 1000, **more: object) -> Cacheable:
    crc = crc32c_extend()(0, content(number, nbytes))
    return Cacheable(f"s3://bucket/{number}", nbytes, crc32c=crc, **more)  # type: ignore[arg-type]


class Source:
    """Counts downloads."""

    def __init__(self, number: int, nbytes: int = 1000) -> None:
        self.data, self.calls = content(number, nbytes), 0

    def __call__(self, write: Write) -> None:
        self.calls += 1
        middle = len(self.data) // 2
        write(middle, self.data[middle:])
        write(0, self.data[:middle])


def read(cache: NodeCache, number: int, nbytes: int = 1000) -> bytes:
    with cache.fetch(entry(number, nbytes), Source(number, nbytes)) as file:
        return file.read_at(0, file.size)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    with NodeCache(tmp_path / "cache", 10_000) as cache:
        yield cache


def files(cache: NodeCache) -> list[str]:
    return sorted(p.name for f in ("objects", "partial") for p in (Path(cache.folder) / f).iterdir())


def test_an_entry_is_downloaded_once_and_then_read_from_disk(cache: NodeCache) -> None:
    source = Source(1)
    for _ in range(3):
        with cache.fetch(entry(1), source) as file:
            assert content(1) == file.read_at(0, 1000)
    assert source.calls == 1
    assert (cache.counts["hits"], cache.counts["misses"], cache.counts["downloaded_nbytes"]) == (2, 1, 1000)
    assert [entry(1).name] == files(cache)


def test_entries_differ_by_uri_range_version_size_and_checksum() -> None:
    one = Cacheable("s3://b/a", 10)
    others = [
        Cacheable("s3://b/b", 10),
        Cacheable("s3://b/a", 11),
        Cacheable("s3://b/a", 10, offset=1),
        Cacheable("s3://b/a", 10, version="x"),
        Cacheable("s3://b/a", 10, part_nbytes=11),
        Cacheable("s3://b/a", 10, crc32c=0),
    ]
    assert len({e.name for e in [one, *others]}) == 7


def test_a_full_cache_keeps_what_came_first(cache: NodeCache) -> None:
    for number in range(10):
        assert content(number) == read(cache, number)
    with pytest.raises(
        OSError, match=r"no room for 1.0 kB in the node cache \(limit 10.0 kB, used 10.0 kB"
    ) as e:
        read(cache, 99)
    assert e.value.errno == errno.ENOSPC
    assert cache.usage() == 10_000
    assert all(entry(number) in cache for number in range(10))


def test_a_failed_download_leaves_nothing_and_the_next_one_succeeds(cache: NodeCache) -> None:
    def fail(write: Write) -> None:
        write(0, b"half")
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        cache.fetch(entry(1), fail)
    assert files(cache) == []
    assert content(1) == read(cache, 1)


def test_bytes_that_do_not_match_are_fetched_again(cache: NodeCache) -> None:
    calls = []

    def flaky(write: Write) -> None:
        calls.append(1)
        write(0, content(2 if len(calls) < DOWNLOADS else 1))

    with cache.fetch(entry(1), flaky) as file:
        assert content(1) == file.read_at(0, 1000)
    assert len(calls) == DOWNLOADS
    assert cache.counts["corrupt"] == DOWNLOADS - 1


def test_bytes_that_never_match_are_a_clear_error_and_are_not_kept(cache: NodeCache) -> None:
    wrong = Source(2)
    with pytest.raises(ChecksumError, match=r"s3://bucket/1, bytes 0..1000: crc32c is .* should be .*"):
        cache.fetch(entry(1), wrong)
    assert wrong.calls == DOWNLOADS
    assert files(cache) == []
    assert content(1) == read(cache, 1)


def test_an_entry_that_rotted_on_disk_is_fetched_again(cache: NodeCache) -> None:
    read(cache, 1)
    path = Path(cache.folder) / "objects" / entry(1).name
    path.write_bytes(content(1)[:-1] + b"!")
    other = NodeCache(cache.folder, 10_000)
    source = Source(1)
    with other.fetch(entry(1), source) as file:
        assert content(1) == file.read_at(0, 1000)
    assert (source.calls, other.counts["corrupt"]) == (1, 1)
    path.write_bytes(b"short")
    assert other.open(entry(1)) is None


def test_threads_that_want_one_entry_share_one_download(cache: NodeCache) -> None:
    started, go, source, got = threading.Event(), threading.Event(), Source(1), []

    def slow(write: Write) -> None:
        started.set()
        go.wait()
        source(write)

    def want(download: object) -> None:
        with cache.fetch(entry(1), download) as file:  # type: ignore[arg-type]
            got.append(file.read_at(0, 1000))

    first = threading.Thread(target=want, args=(slow,))
    first.start()
    started.wait()
    others = [threading.Thread(target=want, args=(source,)) for _ in range(8)]
    for thread in others:
        thread.start()
    go.set()
    for thread in [first, *others]:
        thread.join()
    assert [content(1)] * 9 == got
    assert source.calls == 1


DOWNLOADER = """
import sys
from pipegraph.storage.node_cache import Cacheable, NodeCache
cache = NodeCache(sys.argv[1], 10_000)
def download(write):
    write(0, b"half")
    print("begun", flush=True)
    sys.stdin.read()
cache.fetch(Cacheable("s3://bucket/1", 1000, crc32c=int(sys.argv[2])), download)
"""


def start_downloader(programs: Any, cache: NodeCache) -> Any:
    process = programs.start(DOWNLOADER, cache.folder, entry(1).crc32c)
    assert process.readline() == "begun\n"
    return process


def test_when_the_downloading_process_is_killed_a_waiting_one_takes_over(
    cache: NodeCache, programs: Any
) -> None:
    process = start_downloader(programs, cache)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(read(cache, 1)))
    thread.start()
    assert cache.usage() == 1000  # reserved
    process.send_signal(signal.SIGKILL)
    process.communicate()
    thread.join()
    assert [content(1)] == got
    assert [entry(1).name] == files(cache)


def test_space_that_a_killed_process_had_reserved_counts_once(cache: NodeCache, programs: Any) -> None:
    process = start_downloader(programs, cache)
    with NodeCache(cache.folder, 1000) as full:  # room for this entry alone
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert content(1) == read(full, 1)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        DataError, match=r"NodeCache: the folder '.*/file' cannot be used \(Not a directory\): choose"
    ):
        NodeCache(tmp_path / "file", "1 MB")
