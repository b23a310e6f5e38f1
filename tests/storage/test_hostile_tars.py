"""Tar archives made to do harm, or broken: refused, or harmless."""

import tarfile
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pipegraph.errors import ShardError
from pipegraph.storage.formats import format_of
from pipegraph.storage.shard_files import BytesFile, LocalFile
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


@pytest.mark.parametrize(
    "records",
    [b"9999999999 path=x\n", b"-5 path=x\n", b"12 path", b"x", b"11 size=-9\n", b"0 \n", b"11 sizeX-9\n"],
)
def test_malformed_pax_records_are_refused(records: bytes) -> None:
    info = tarfile.TarInfo("p")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    data = info.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")
    refuse_tar(data + sized(0), "malformed pax record")


def test_a_header_with_a_flipped_bit_is_refused(make_tar: MakeTar) -> None:
    data = bytearray(make_tar([("a.jpg", b"x")]).read_bytes())
    data[3] ^= 4
    refuse_tar(bytes(data), "its checksum does not match")


@pytest.mark.parametrize("keep", [100, 600, 1024, 1536])
def test_a_shard_cut_short_is_refused_wherever_the_cut_is(make_tar: MakeTar, keep: int) -> None:
    refuse_tar(make_tar([("a.jpg", b"x" * 500), ("b.jpg", b"x" * 500)]).read_bytes()[:keep], "truncated")


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_tiny_members_need_little_memory(tmp_path: Path, count: int) -> None:
    header = tarfile.TarInfo("0000000.t").tobuf(tarfile.USTAR_FORMAT)
    numbers = np.arange(count)
    digits = numbers[:, None] // 10 ** np.arange(6, -1, -1) % 10
    sums = sum(header[:148]) + 8 * 32 + sum(header[156:]) + digits.sum(1)
    path = tmp_path / "tiny.tar"
    with path.open("wb") as out:
        for start in range(0, count, 100_000):
            piece = np.tile(np.frombuffer(header, np.uint8), (100_000, 1))
            rows = slice(start, start + 100_000)
            piece[:, :7] = digits[rows] + ord("0")
            piece[:, 148:154] = sums[rows, None] // 8 ** np.arange(5, -1, -1) % 8 + ord("0")
            out.write(piece.tobytes())
        out.write(bytes(1024))
    with memory_bounded(64 << 20), LocalFile(path) as file:
        assert sum(b.samples for b in format_of(path.name).index(file)) == count
        last = deque(islice(format_of(path.name).samples(file), 20_000), maxlen=1)
    assert last[0]["key"] == "0019999"
