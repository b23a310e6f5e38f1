"""Shards made for harm, through ``Load`` under each policy: refused or harmless, said, and in bounded memory and time."""

import functools
import gzip
import io
import json
import struct
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError
from pipegraph.storage.formats import lines, shard_format as base

GOOD = 6
POLICIES = ["raise", pg.Skip(5), pg.Retry(1, then=pg.Skip(5)), pg.Skip(0)]


def header(name: str, size: int, kind: bytes = b"0") -> bytes:
    """A tar header that says any size."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def gigantic_field(path: Path) -> None:
    path.write_bytes(header("0.bin", 1 << 62) + b"x" * 512 + bytes(1024))


def gigantic_pax_header(path: Path) -> None:
    path.write_bytes(header("pax", 1 << 40, b"x") + b"9" * 512 + bytes(1024))


def gigantic_long_name(path: Path) -> None:
    path.write_bytes(header("././@LongLink", 1 << 30, b"L") + b"a" * 512 + bytes(1024))


def a_field_that_ends_behind_the_file(path: Path) -> None:
    path.write_bytes(header("0.bin", 1 << 20) + b"x" * 512 + bytes(1024))


def one_sample_of_many_members(path: Path) -> None:
    data = b"".join(header(f"0.f{i}", 0) for i in range(2_000))
    path.write_bytes(data + bytes(1024))


def endless_gz_line(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=9) as packed:
        for _ in range(96):
            packed.write(b" " * (1 << 20))  # no line end ever


def gz_that_unpacks_to_much(path: Path) -> None:
    row = json.dumps({"x": "a" * 10_000}).encode() + b"\n"
    with gzip.open(path, "wb", compresslevel=9) as packed:
        for _ in range(24):
            packed.write(row * 100)


def zst_that_unpacks_to_much(path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="the shards extra brings zstandard")
    row = json.dumps({"x": "a" * 10_000}).encode() + b"\n"
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        for _ in range(24):
            packed.write(row * 100)


def npy_of_many_dimensions(path: Path) -> None:
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9," * 60_000 + ")}"
    data = text.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", len(data)) + data)


def npy_that_says_terabytes(path: Path) -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    path.write_bytes(file.getvalue() + bytes(64))


HOSTILE: list[tuple[str, Callable[[Path], None]]] = [
    ("tar", gigantic_field),
    ("tar", gigantic_pax_header),
    ("tar", gigantic_long_name),
    ("tar", a_field_that_ends_behind_the_file),
    ("tar", one_sample_of_many_members),
    ("jsonl.gz", endless_gz_line),
    ("jsonl.gz", gz_that_unpacks_to_much),
    ("jsonl.zst", zst_that_unpacks_to_much),
    ("npy", npy_of_many_dimensions),
    ("npy", npy_that_says_terabytes),
]


@functools.cache
def hostile(make: Callable[[Path], None], form: str) -> bytes:
    """A part made for harm; packing one takes longer than reading it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"b.{form}"
        make(path)
        return path.read_bytes()


def good(path: Path) -> None:
    """A part of the format that its name says."""
    form = path.name.partition(".")[2]
    if form == "tar":
        with tarfile.open(path, "w") as archive:
            for i in range(GOOD):
                info = tarfile.TarInfo(f"{i}.bin")
                info.size = 3
                archive.addfile(info, io.BytesIO(b"abc"))
    elif form.startswith("jsonl"):
        text = b"".join(json.dumps({"x": str(i)}).encode() + b"\n" for i in range(GOOD))
        path.write_bytes(gzip.compress(text))
    else:
        np.save(path, np.arange(GOOD))


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of what may be unpacked, small enough for quick bombs."""
    monkeypatch.setattr(base, "MAX_UNPACKED_NBYTES", 1 << 24)
    monkeypatch.setattr(lines, "MAX_LINE_NBYTES", 1 << 22)


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more is held at any time than 280 MiB: one step of zst may unpack 128, which is cut into lines."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 280 << 20, f"{peak >> 20} MiB"


def graph_of(folder: Path, order: pg.order.Order, policy: Any) -> pg.Graph:
    graph = pg.Graph("hostile", seed=2)
    graph.add(ops.ShardSelect(folder, order=order), name="select").then(
        ops.Load(), name="load", on_error=policy
    )
    return graph


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize(("form", "make"), HOSTILE, ids=lambda v: getattr(v, "__name__", v))
def test_a_hostile_part_is_refused_by_name_and_under_skip_the_others_are_read(
    form: str,
    make: Callable[[Path], None],
    policy: Any,
    tmp_path: Path,
    small_limits: None,
    bounded: None,
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in ("a", "c"):
        good(folder / f"{name}.{form}")
    (folder / f"b.{form}").write_bytes(hostile(make, form))
    tracemalloc.reset_peak()
    graph = graph_of(folder, pg.order.PartOrder(shuffle=False), policy)
    with graph.loader() as loader:
        if policy in ("raise", pg.Skip(0)):
            if make in (gz_that_unpacks_to_much, zst_that_unpacks_to_much):
                assert (
                    sum(1 for _ in loader) == 2 * GOOD + 2_400
                )  # as a stream it is harmless, whatever its length
                return
            with pytest.raises(DataError, match=r"b\."):
                for _ in loader:
                    pass
            return
        samples = sum(1 for _ in loader)
        told = loader.profile().quarantined
    if make in (gz_that_unpacks_to_much, zst_that_unpacks_to_much):
        assert samples == 2 * GOOD + 2_400
        assert not told
    else:
        assert samples >= 2 * GOOD
        assert [entry.stage for entry in told] == ["load"]
        assert "b." in str(told[0].error)
