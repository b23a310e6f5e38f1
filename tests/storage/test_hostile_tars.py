"""Tar archives made to do harm, or broken: refused, or harmless."""

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipegraph.errors import ShardError
from pipegraph.storage.formats import format_of
from pipegraph.storage.shard_files import BytesFile
from tests.storage.reading_shards import memory_bounded, samples

MakeTar = Callable[..., Path]


def special(kind: bytes, name: str = "a.jpg", target: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


def sized(size: int, kind: bytes = tarfile.REGTYPE, name: str = "a.jpg") -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(2048)


def refuse_tar(data: bytes, message: str) -> None:
    file = BytesFile(data, "bad.tar")
    tar = format_of("bad.tar")
    with pytest.raises(ShardError, match=message):
        list(tar.samples(file))
    with pytest.raises(ShardError, match=message):
        list(tar.index(file))


@pytest.mark.parametrize("name", ["../../evil.jpg", "a/../../evil.jpg", "/abs/evil.jpg", "a/.."])
def test_paths_that_leave_the_folder_are_refused(make_tar: MakeTar, name: str) -> None:
    with pytest.raises(ShardError, match=r"absolute paths and '\.\.' are refused"):
        samples(make_tar([(name, b"x")]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "character device"),
        (tarfile.BLKTYPE, "block device"),
        (tarfile.FIFOTYPE, "pipe"),
        (tarfile.GNUTYPE_SPARSE, "sparse"),
        (b"Z", "unknown type 'Z'"),
    ],
)
def test_links_devices_pipes_and_unknown_members_are_refused(kind: bytes, message: str) -> None:
    refuse_tar(special(kind, target="/etc/passwd"), message)


def test_a_size_beyond_the_file_is_refused_before_memory_is_taken() -> None:
    with memory_bounded(64 << 20):
        refuse_tar(sized(1 << 40), "says 1099511627776 bytes, but only 2048 follow")


@pytest.mark.parametrize("keep", [100, 600, 1024, 1536])
def test_a_shard_cut_short_is_refused_wherever_the_cut_is(make_tar: MakeTar, keep: int) -> None:
    refuse_tar(make_tar([("a.jpg", b"x" * 500), ("b.jpg", b"x" * 500)]).read_bytes()[:keep], "truncated")
