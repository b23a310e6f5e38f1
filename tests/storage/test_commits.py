"""Entries on their way to disk: read by their own process, seen by no other, never in the way."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipegraph.errors import LoaderClosedError
from pipegraph.storage import commits, filelock, space
from pipegraph.storage.checksum import crc32c_extend
from pipegraph.storage.commits import MAX_PENDING
from pipegraph.storage.eviction import CacheEntry
from pipegraph.storage.node_cache import Cacheable, NodeCache

Read = Callable[..., bytes]


def content(number: int) -> bytes:
    return bytes([number]) * 1000


def entry(number: int) -> Cacheable:
    return Cacheable(f"s3://bucket/{number}", 1000, crc32c=crc32c_extend()(0, content(number)))


def read(cache: NodeCache, number: int) -> bytes:
    with cache.fetch(entry(number), lambda sink: sink.write_at(0, content(number))) as file:
        return file.read_at(0, 1000)


class SlowDisk:
    """Syncs wait for `go`."""

    def __init__(self) -> None:
        self.asked, self.go, self.syncs = threading.Event(), threading.Event(), 0
        self._real = os.fsync

    def fsync(self, fd: int) -> None:
        self.asked.set()
        self.go.wait()
        self.syncs += 1
        self._real(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.go.set()


@pytest.fixture
def cache(disk: SlowDisk, tmp_path: Path) -> Iterator[NodeCache]:
    cache = NodeCache(tmp_path, 100_000)
    yield cache
    disk.go.set()
    cache.close()


def test_an_entry_is_read_before_its_sync_and_seen_by_others_after_it(
    cache: NodeCache, disk: SlowDisk
) -> None:
    other = NodeCache(cache.folder, cache.limit)
    file = cache.fetch(entry(1), lambda sink: sink.write_at(0, content(1)))
    disk.asked.wait()
    assert file.read_at(0, 1000) == content(1)
    assert read(cache, 1) == content(1)  # again, from the same file
    assert (cache.stats.hits, cache.stats.misses) == (1, 1)
    assert entry(1) in cache
    assert entry(1) not in other
    assert other.open(entry(1)) is None
    disk.go.set()
    cache.flush()
    assert read(other, 1) == content(1)
    assert other.stats.hits == 1
    path = other._path(entry(1))
    assert not other._space.remove(path)  # the first reader still has it
    file.close()
    assert other._space.remove(path)


def test_another_process_that_wants_it_waits_for_the_sync_and_not_for_a_download(
    cache: NodeCache, disk: SlowDisk
) -> None:
    read(cache, 1)
    other, found = NodeCache(cache.folder, cache.limit), []
    thread = threading.Thread(target=lambda: found.append(read(other, 1)))
    thread.start()
    disk.go.set()
    thread.join()
    assert found == [content(1)]
    assert other.stats.downloaded_nbytes == 0


def test_what_the_disk_refuses_is_an_error_for_its_readers_and_leaves_nothing(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        file = cache.fetch(entry(1), lambda sink: sink.write_at(0, content(1)))
        cache.flush()
        with file, pytest.raises(OSError, match="the disk is broken"):
            file.read_at(0, 10)
        with pytest.raises(OSError, match="the disk is broken"):
            cache.put(entry(2), content(2))
    assert cache.usage() == 0
    assert read(cache, 1) == content(1)


def test_room_that_a_new_entry_needs_is_waited_for_where_it_is_still_being_synced(
    tmp_path: Path, disk: SlowDisk
) -> None:
    with NodeCache(tmp_path, 1000) as cache:
        read(cache, 1)
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(read(cache, 2)))
        thread.start()
        disk.go.set()
        thread.join()
        assert found == [content(2)]
        assert cache.stats.evicted == 1
        assert cache.usage() == 1000


def test_an_entry_renamed_while_room_is_looked_for_is_seen_and_goes(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeCache(tmp_path, 1000) as cache:
        read(cache, 1)
        scan = space._scan

        def then_it_arrives(folder: str) -> list[CacheEntry]:
            found = scan(folder)
            disk.go.set()
            cache.flush()
            return found

        monkeypatch.setattr(space, "_scan", then_it_arrives)
        assert read(cache, 2) == content(2)
        assert cache.stats.evicted == 1


def test_an_entry_that_comes_while_another_waits_to_look_for_room_is_waited_for(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeCache(tmp_path, 1000) as cache:
        locked, wait = cache._space.locked, cache._commits.wait

        @contextlib.contextmanager
        def first_the_other() -> Iterator[None]:
            monkeypatch.setattr(cache._space, "locked", locked)
            read(cache, 1)
            with locked():
                yield

        def waits(name: str) -> None:
            disk.go.set()
            wait(name)

        monkeypatch.setattr(cache._space, "locked", first_the_other)
        monkeypatch.setattr(cache._commits, "wait", waits)
        try:
            assert read(cache, 2) == content(2)
            assert cache.stats.evicted == 1
        finally:
            disk.go.set()


def test_an_entry_that_is_renamed_but_still_locked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed, go = threading.Event(), threading.Event()

    def held(fd: int, operation: int) -> None:
        renamed.set()
        go.wait()
        filelock.flock(fd, operation)

    monkeypatch.setattr(commits, "flock", held)
    with NodeCache(tmp_path, 1000) as cache:
        wait = cache._commits.wait

        def waits(name: str) -> None:
            go.set()
            wait(name)

        monkeypatch.setattr(cache._commits, "wait", waits)
        try:
            read(cache, 1)
            renamed.wait()
            assert read(cache, 2) == content(2)
            assert cache.stats.evicted == 1
        finally:
            go.set()


def test_closing_ends_waits_and_loses_nothing_that_was_fetched(cache: NodeCache, disk: SlowDisk) -> None:
    for number in range(MAX_PENDING):
        read(cache, number)
    errors: list[BaseException] = []

    def one_too_many() -> None:
        try:
            read(cache, MAX_PENDING)
        except LoaderClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=one_too_many)
    waiting.start()
    disk.asked.wait()
    closing = threading.Thread(target=cache.close)
    closing.start()
    waiting.join()
    assert len(errors) == 1
    disk.go.set()
    closing.join()
    names = {path.name for path in (Path(cache.folder) / "objects").iterdir()}
    assert names == {entry(number).name for number in range(MAX_PENDING)}
    assert list((Path(cache.folder) / "partial").iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name == "pipegraph-cache-sync"]
