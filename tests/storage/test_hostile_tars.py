"""Tar archives made to do harm, or broken: refused, or harmless."""

import bz2
import gzip
import lzma
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


def test_two_dots_inside_a_name_are_harmless(make_tar: MakeTar) -> None:
    assert samples(make_tar([("a..b", b"x")])) == [{"key": "a", ".b": b"x"}]


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


def test_folders_are_passed_over(make_tar: MakeTar) -> None:
    assert list(format_of("a.tar").samples(BytesFile(special(tarfile.DIRTYPE, "folder")))) == []


def test_a_size_beyond_the_file_is_refused_before_memory_is_taken() -> None:
    with memory_bounded(64 << 20):
        refuse_tar(sized(1 << 40), "says 1099511627776 bytes, but only 2048 follow")


def test_a_range_outside_a_file_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(sized(1 << 40))
    with memory_bounded(64 << 20), LocalFile(tmp_path / "a.tar") as file:
        for offset, nbytes in ((0, 1 << 40), (-1, 5), (3000, 1), (0, -1)):
            with pytest.raises(ShardError, match="asked for, but the shard has 2560"):
                file.read_at(offset, nbytes)


def test_gigantic_extension_headers_are_refused_before_memory_is_taken() -> None:
    with memory_bounded(64 << 20):
        refuse_tar(sized(1 << 40, tarfile.GNUTYPE_LONGNAME), "extension header .* says 1099511627776 bytes")
        refuse_tar(sized(1 << 40, tarfile.XHDTYPE), "extension header .* says 1099511627776 bytes")


@pytest.mark.parametrize(
    "records",
    [b"9999999999 path=x\n", b"-5 path=x\n", b"12 path", b"x", b"11 size=-9\n", b"0 \n", b"11 sizeX-9\n"],
)
def test_malformed_pax_records_are_refused(records: bytes) -> None:
    info = tarfile.TarInfo("p")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    data = info.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")
    refuse_tar(data + sized(0), "malformed pax record")


def test_a_pax_size_beyond_the_file_is_refused() -> None:
    records = b"22 size=1099511627776\n"
    info = tarfile.TarInfo("p")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    data = info.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")
    refuse_tar(data + sized(0), "says 1099511627776 bytes")


def test_a_negative_size_is_refused() -> None:
    header = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"-0000000777\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    refuse_tar(bytes(header) + bytes(1024), "negative size")


def test_a_header_with_a_flipped_bit_is_refused(make_tar: MakeTar) -> None:
    data = bytearray(make_tar([("a.jpg", b"x")]).read_bytes())
    data[3] ^= 4
    refuse_tar(bytes(data), "its checksum does not match")


@pytest.mark.parametrize("keep", [100, 600, 1024, 1536])
def test_a_shard_cut_short_is_refused_wherever_the_cut_is(make_tar: MakeTar, keep: int) -> None:
    refuse_tar(make_tar([("a.jpg", b"x" * 500), ("b.jpg", b"x" * 500)]).read_bytes()[:keep], "truncated")


def test_a_field_that_comes_twice_is_refused(make_tar: MakeTar) -> None:
    with pytest.raises(ShardError, match="the field 'jpg' twice"):
        samples(make_tar([("a.jpg", b"1"), ("a.JPG", b"2")]))
    with pytest.raises(ShardError, match="the field '_key' twice"):
        samples(make_tar([("a.key", b"1"), ("a._key", b"2")]))
    with pytest.raises(ShardError, match="the field 'label' twice"):
        samples(make_tar([("a.cls", b"1"), ("a.label", b"2")]))


def test_a_sample_of_endless_fields_is_refused(make_tar: MakeTar) -> None:
    with pytest.raises(ShardError, match="more than 1000 fields"):
        samples(make_tar([(f"a.{i}", b"") for i in range(2000)]))


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


@pytest.mark.parametrize(
    ("pack", "tool"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")]
)
def test_a_packed_tar_under_another_name_is_said_to_be_one(pack: Callable[[bytes], bytes], tool: str) -> None:
    refuse_tar(
        pack(sized(0) + bytes(10240)), f"packed with {tool}; tars are read in place, so unpack it first"
    )
    refuse_tar(pack(np.random.default_rng(0).bytes(2048)), f"packed with {tool}")
