"""Shards that we write: read by our own readers, by tarfile and pyarrow, and the same however they came about."""

import errno
import io
import itertools
import json
import multiprocessing
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError, LoaderClosedError, ShardError
from pipegraph.storage import build_manifest, pack_shards
from pipegraph.storage.formats import format_of
from pipegraph.storage.manifest import Manifest
from pipegraph.storage.shard_files import LocalFile
from pipegraph.storage.writing import pack, pack_folder
from pipegraph.storage.writing.pack import PackProgress
from pipegraph.storage.writing.tar_encoder import header
from tests.storage.reading_shards import written as samples

FORMATS = ["tar", "parquet"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Class folders with 300 samples of two files each."""
    rng = np.random.default_rng(0)
    for number in range(300):
        folder = tmp_path / "photos" / ("cats" if number % 3 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04d}.jpg").write_bytes(rng.bytes(int(rng.integers(1, 3000))))
        (folder / f"{number:04d}.json").write_text(json.dumps({"n": number}))
    return tmp_path / "photos"


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def expected(photos: Path) -> list[Any]:
    return [
        {
            "key": f"{path.parent.name}/{path.stem}",
            "jpg": path.read_bytes(),
            "json": path.with_suffix(".json").read_bytes(),
            "label": ["cats", "dogs"].index(path.parent.name),
        }
        for path in sorted(photos.rglob("*.jpg"))
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_of_files_is_read_back_whatever_the_workers(
    photos: Path, tmp_path: Path, format: str
) -> None:
    for workers in (1, 3):
        pack_shards(photos, tmp_path / f"by-{workers}", format=format, size="100 kB", workers=workers)
    assert len(list((tmp_path / "by-1").glob("shard*"))) > 4
    assert shards(tmp_path / "by-1") == shards(tmp_path / "by-3")
    assert samples(tmp_path / "by-1") == expected(photos)


@pytest.mark.parametrize("format", FORMATS)
def test_the_manifest_is_what_an_index_finds(photos: Path, tmp_path: Path, format: str) -> None:
    manifest = pack_shards(photos, tmp_path / "out", format=format, size="100 kB", workers=1)
    found = build_manifest(sorted((tmp_path / "out").glob(f"shard*.{format}")))
    assert found == manifest == Manifest.load(tmp_path / "out" / "_manifest.json")
    assert np.array_equal(found.block_crc32c, manifest.block_crc32c)
    assert np.array_equal(found.block_nbytes, manifest.block_nbytes)


def test_the_names_of_classes_are_in_the_manifest_of_a_pack(photos: Path, tmp_path: Path) -> None:
    pack_shards(photos, tmp_path / "out", size="100 kB", workers=1)
    assert ops.ShardSelect(tmp_path / "out").classes == ("cats", "dogs") == ops.ListFiles(photos).classes


def test_shards_of_files_keep_to_their_size(photos: Path, tmp_path: Path) -> None:
    pack_shards(photos, tmp_path / "out", size="100 kB", workers=1)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert max(sizes) <= 100_000
    assert min(sizes[:-1]) > 90_000


def test_tarfile_reads_our_tars(photos: Path, tmp_path: Path) -> None:
    pack_shards(photos, tmp_path / "out", workers=1)
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as archive:
        members = archive.getmembers()
        assert len(members) == 900
        assert {(m.mtime, m.uid, m.gid, m.mode, m.isreg()) for m in members} == {(0, 0, 0, 0o444, True)}
        first = archive.extractfile("dogs/0000.jpg")
        assert first is not None
        assert first.read() == (photos / "dogs" / "0000.jpg").read_bytes()


@pytest.mark.parametrize(
    "name", ["a.jpg", "é.jpg", "a" * 200 + ".jpg", "d/" * 60 + "a.jpg", "\udcff.jpg", "x" * 100]
)
def test_headers_are_those_of_tarfile(name: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = 1234, 0o444
    plain = header(name, 1234)
    with tarfile.open(fileobj=io.BytesIO(plain + bytes(1536 + 1024))) as archive:
        (found,) = archive.getmembers()
    assert (found.name, found.size, found.mode, found.mtime) == (name, 1234, 0o444, 0)
    again = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    assert len(plain) == len(again)


def test_pyarrow_reads_our_parquet(photos: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pack_shards(photos, tmp_path / "out", format="parquet", workers=2)
    rows = pq.read_table(tmp_path / "out" / "shard-000000.parquet").to_pylist()
    assert sorted(rows, key=lambda row: row["key"]) == expected(photos)


def test_a_shuffle_keeps_every_sample_and_follows_from_its_seed(photos: Path, tmp_path: Path) -> None:
    for name, seed, workers in (("a", 1, 1), ("b", 1, 2), ("c", 2, 2)):
        pack_shards(photos, tmp_path / name, size="100 kB", workers=workers, shuffle=seed)
    a, b, c = (shards(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
    assert samples(tmp_path / "a") == samples(tmp_path / "c") == expected(photos)
    with tarfile.open(tmp_path / "a" / "shard-000000.tar") as archive:
        labels = [name.split("/")[0] for name in archive.getnames()]
    assert 0.2 < labels.count("dogs") / len(labels) < 0.5


class Rows:
    """A map-style dataset of every kind of value."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < 500:
            raise IndexError(index)
        return {
            "image": np.full((2, 3), index % 256, np.uint8),
            "n": index,
            "ok": index % 2 == 0,
            "text": "ä" * (index % 7),
            "tokens": list(range(index % 5 + 1)),
            "x": index / 2 if index % 2 else index,
        }


def test_a_data_set_in_a_tar_is_text_json_and_npy(tmp_path: Path) -> None:
    pack_shards(Rows(), tmp_path / "out", workers=1)
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as archive:
        first = {m.name[10:]: archive.extractfile(m).read() for m in archive.getmembers()[:6]}  # type: ignore[union-attr]
    assert np.load(io.BytesIO(first.pop("image"))).shape == (2, 3)
    assert first == {"n": b"0", "ok": b"true", "text": b"", "tokens": b"[0]", "x": b"0"}


def read_tars(folder: Path) -> list[dict[str, Any]]:
    graph = pg.Graph("tars")
    graph.add(ops.ShardSelect(folder, shuffle=False)).then(ops.Load())
    with graph.loader() as loader:
        return list(loader)


VALUES: dict[str, Any] = {
    "number": 0.1,
    "nan": float("inf"),
    "count": -3,
    "large": 1 << 70,
    "yes": True,
    "none": None,
    "text": "grüße",
    "txt": "7",
    "raw": b"\0\xff",
    "json": {"a": [1, {"b": "c"}]},
    "words": ["a", "b"],
    "a.name": "with a dot",
    "label": "cat",
    "_key": "a text",
}
ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.zeros((0, 4), np.float32),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["a", "bc"]),
    np.array(3 + 4j),
]


@pytest.mark.parametrize("key", ["a", "é" * 100])
def test_a_tar_gives_back_what_was_written(key: str, tmp_path: Path) -> None:
    arrays = {f"array{number}": array for number, array in enumerate([*ARRAYS, torch.ones(2, 2)])}
    with pg.ShardWriter(tmp_path / "out", "tar") as writer:
        writer.write({"key": key, **VALUES, **arrays})
        writer.write({"key": "b", "label": 3, "cls2": 4})
    first, second = read_tars(tmp_path / "out")
    for name, array in arrays.items():
        found = first.pop(name)
        np.testing.assert_array_equal(found, np.asarray(array))
        assert (found.dtype, found.shape) == (np.asarray(array).dtype, tuple(array.shape))
        found[...] = found  # it owns its values
    assert first == {"key": key, **VALUES}
    assert second == {"key": "b", "label": 3, "cls2": 4}


def test_tars_of_others_are_bytes_whatever_their_extensions(tmp_path: Path) -> None:
    with pg.ShardWriter(tmp_path / "ours", "tar") as writer:
        writer.write({"key": "a", "npy": ARRAYS[0], "txt": "text", "json": 0.5})
    (tmp_path / "theirs").mkdir()
    with (
        tarfile.open(tmp_path / "ours" / "shard-000000.tar") as ours,
        tarfile.open(tmp_path / "theirs" / "a.tar", "w") as theirs,
    ):
        for member in ours.getmembers():
            member.uname = "someone"
            theirs.addfile(member, ours.extractfile(member))
    (sample,) = read_tars(tmp_path / "theirs")
    assert np.load(io.BytesIO(sample.pop("npy"))).shape == (2, 3)
    assert sample == {"key": "a", "txt": b"text", "json": b"0.5"}


@pytest.mark.parametrize(
    ("value", "change", "said"),
    [
        (ARRAYS[0], (b"(2, 3)", b"(2, 9)"), r"field 'a\.x' \(byte 0\) is broken: .*says \(2, 9\) of int16"),
        (ARRAYS[0], (b"NUMPY", b"numpy"), r"field 'a\.x' \(byte 0\) is broken: .*not a \.npy file"),
        ([1, 2], (b"[1,2]", b"[1,2["), r"field 'a\.x' \(byte 0\) is broken"),
        ("ab", (b"ab\0", b"\xffb\0"), r"field 'a\.x' \(byte 0\) is broken"),
    ],
)
def test_a_written_field_that_is_damaged_is_named(
    value: Any, change: tuple[bytes, bytes], said: str, tmp_path: Path
) -> None:
    with pg.ShardWriter(tmp_path / "out", "tar") as writer:
        writer.write({"key": "a", "x": value})
    shard = tmp_path / "out" / "shard-000000.tar"
    data = shard.read_bytes()
    assert change[0] in data
    (tmp_path / "a.tar").write_bytes(data.replace(*change))
    with pytest.raises(ShardError, match=said):
        read_tars(tmp_path / "a.tar")


def test_a_stream_is_written_in_its_order(tmp_path: Path) -> None:
    def made() -> Iterator[dict[str, Any]]:
        return ({"n": number, "text": "a" * number} for number in range(100))

    manifest = pack_shards(made, tmp_path / "out", format="parquet", size="1 kB")
    assert len(manifest) == 100
    assert len(manifest.parts) > 3
    with pytest.raises(GraphError, match="a stream cannot be shuffled as it passes; write it to shards"):
        pack_shards(made, tmp_path / "other", shuffle=1)


def folder_of(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


@pytest.mark.parametrize("format", FORMATS)
def test_no_file_of_a_folder_is_taken_for_what_a_pack_adds(tmp_path: Path, format: str) -> None:
    keys = folder_of(tmp_path / "keys", "x.jpg", "x.key", "y.jpg", "y.key")
    pack_shards(keys, tmp_path / "a", format=format, workers=1)
    assert samples(tmp_path / "a") == [
        {"key": key, "jpg": f"{key}.jpg".encode(), "_key": f"{key}.key".encode()} for key in "xy"
    ]
    labels = folder_of(tmp_path / "labels", "a/x.jpg", "a/x.label", "b/y.jpg", "b/y.label")
    with pytest.raises(
        DataError, match=r"a/x\.label': the sample 'a/x' has .* a label from its class folder"
    ):
        pack_shards(labels, tmp_path / "b", format=format, workers=1)


@pytest.mark.parametrize("format", FORMATS)
def test_labels_are_the_samples_own_where_they_have_some(tmp_path: Path, format: str) -> None:
    own = folder_of(tmp_path / "own", "a/x.cls", "b/z.cls")
    pack_shards(own, tmp_path / "b", format=format, workers=1)
    assert samples(tmp_path / "b") == [{"key": key, "cls": f"{key}.cls".encode()} for key in ("a/x", "b/z")]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "made", [np.zeros, lambda n: torch.zeros(n, dtype=torch.float64), lambda n: [0.0] * n]
)
def test_a_loop_may_use_its_buffer_again(tmp_path: Path, format: str, made: Any) -> None:
    buffer = made(2)
    with pg.ShardWriter(tmp_path / "out", format=format) as writer:
        for number in range(3):
            buffer[0] = buffer[1] = number
            writer.write({"key": str(number), "n": buffer})
    found = samples(tmp_path / "out")
    assert [list(sample["n"]) for sample in found] == [[n, n] for n in range(3)]


@pytest.mark.parametrize("format", FORMATS)
def test_a_stopped_stream_is_written_again(tmp_path: Path, format: str) -> None:
    def packed(numbers: Any, stop: int | None = None) -> Manifest:
        def made() -> Iterator[dict[str, Any]]:
            for place, n in enumerate(numbers):
                if place == stop:
                    raise RuntimeError("stopped")
                yield {"n": n, "text": "text" * 20, "x": np.arange(n % 7 + 1)}

        return pack_shards(made, tmp_path / "out", format=format, size="2 kB")

    with pytest.raises(RuntimeError, match="stopped"):
        packed(range(100), stop=70)
    manifest = packed(range(30, 60))
    assert len(manifest.parts) == len(list((tmp_path / "out").glob("shard*")))
    assert sorted(int(sample["n"]) for sample in samples(tmp_path / "out")) == list(range(30, 60))


@pytest.mark.parametrize(
    ("value", "said"),
    [(1 << 70, r"\(int64\): int too big.*as text"), ("a\ud800", r"\(string\): .*surrogates")],
)
def test_what_parquet_has_no_place_for_names_its_own_sample(tmp_path: Path, value: Any, said: str) -> None:
    given = [{"n": type(value)()}, {"n": value}, {"n": type(value)()}]
    with pytest.raises(
        DataError, match=rf"sample 1: field 'n': a value has no place in its Parquet column {said}"
    ):
        pack_shards(given, tmp_path / "out", format="parquet", workers=1)


KILLED = """
import sys
from pipegraph.storage import pack_shards
def report(state):
    print(state.shards_done, flush=True)
pack_shards(sys.argv[1], sys.argv[2], format=sys.argv[3], size="30 kB", workers=2, progress=report)
"""


@pytest.mark.parametrize("format", FORMATS)
def test_a_pack_that_is_killed_again_and_again_ends_with_the_same_shards(
    photos: Path, tmp_path: Path, format: str, programs: Any
) -> None:
    pack_shards(photos, tmp_path / "whole", format=format, size="30 kB", workers=1)
    for _ in range(3):
        with programs.start(KILLED, photos, tmp_path / "killed", format) as process:
            process.readline()
            process.readline()
            process.kill()
    assert (tmp_path / "killed" / "_pack.json.partial").exists()
    written = {path: path.stat().st_ino for path in (tmp_path / "killed").glob("shard*")}
    assert written
    pack_shards(photos, tmp_path / "killed", format=format, size="30 kB", workers=2)
    assert written == {path: path.stat().st_ino for path in written}
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")


def test_a_complete_pack_is_left_as_it_is_and_other_settings_are_an_error(
    photos: Path, tmp_path: Path
) -> None:
    manifest = pack_shards(photos, tmp_path / "out", size="100 kB", workers=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert pack_shards(photos, tmp_path / "out", size="100 kB", workers=2) == manifest
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(
        DataError, match=r"made with other settings: size 100000 there, 200000 here\. Use those"
    ):
        pack_shards(photos, tmp_path / "out", size="200 kB")
    next((tmp_path / "out").glob("*.tar")).unlink()
    with pytest.raises(DataError, match="missing, or not of"):
        pack_shards(photos, tmp_path / "out", size="100 kB")


def test_a_source_that_has_changed_since_is_another_pack(photos: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(state: PackProgress) -> None:
        if state.shards_done == 2:
            raise Stop

    with pytest.raises(Stop):
        pack_shards(photos, tmp_path / "out", size="30 kB", workers=2, progress=stop)
    (photos / "cats" / "0001.jpg").write_bytes(b"other")
    with pytest.raises(DataError, match="was begun with other settings: source"):
        pack_shards(photos, tmp_path / "out", size="30 kB")


def test_a_folder_with_other_shards_or_another_writer_is_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard-000000.tar").write_bytes(b"mine")
    with pytest.raises(DataError, match="holds 'shard-000000.tar' already"):
        pack_shards(photos, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["shard-000000.tar"]
    with (
        pg.ShardWriter(tmp_path / "open") as writer,
        pytest.raises(DataError, match="another process is packing into this folder"),
    ):
        writer.write({"n": 1})
        pg.ShardWriter(tmp_path / "open")


def test_a_folder_without_file_locks_is_refused_for_a_pack(
    photos: Path, tmp_path: Path, no_file_locks: None
) -> None:
    with pytest.raises(
        DataError, match=r"out' lies on a file system without file locks \(.*\).*: mount it with locks"
    ):
        pack_shards(photos, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_writer_resumes_behind_its_last_whole_shard(tmp_path: Path) -> None:
    rows = [{"key": f"{number:03d}", "data": bytes([number]) * 1000} for number in range(100)]

    def write(folder: str, stop: int | None) -> int:
        with pg.ShardWriter(tmp_path / folder, size="10 kB") as writer:
            begun = writer.written
            for number, row in enumerate(itertools.islice(rows, begun, None)):
                if begun + number == stop:
                    raise KeyboardInterrupt
                writer.write(row)
        return begun

    write("whole", None)
    for stop in (25, 60):
        with pytest.raises(KeyboardInterrupt):
            write("stopped", stop)
        assert not list((tmp_path / "stopped").glob(".shard*"))
    assert 40 < write("stopped", None) <= 60
    assert shards(tmp_path / "stopped") == shards(tmp_path / "whole")
    with pytest.raises(LoaderClosedError, match="everything was written before"):
        pg.ShardWriter(tmp_path / "whole", size="10 kB").write(rows[0])


@pytest.mark.parametrize(
    ("format", "first", "second", "message"),
    [
        ("tar", {"key": "a.b", "x": 1}, None, r"'a.b.x' would be read as another one"),
        ("tar", {"key": "../a", "x": 1}, None, "would be read as another one"),
        ("tar", {"key": "a", "JPG": b""}, None, "would be read as another one"),
        ("tar", {"key": "a"}, None, "has no fields"),
        ("tar", {"key": "a", "x": 1}, {"key": "a", "y": 1}, "two samples in a row have the key 'a'"),
        *[
            (
                "tar",
                {"key": "a", "label": "cat", "cls": whole},
                None,
                "sample 'a' has a field 'label' and the whole",
            )
            for whole in ("0", f"{(1 << 64) - 1}", b" 7\n", 3, np.int64(3), torch.tensor(1), bytearray(b"1"))
        ],
        *[
            ("tar", {"key": "a", "label": odd}, None, f"sample 'a': the label {odd} is no number of 64 bits")
            for odd in (10**25, 1 << 64, -(1 << 63) - 1)
        ],
        ("tar", {f"f{n}": b"" for n in range(1000)}, None, "has 1000 fields, more than the 1000"),
        ("tar", {"key": "a", "x\0y": b"1"}, None, "a tar keeps fields in .* which end at a null character"),
        ("tar", {"key": "a", "x\ud800": b"1"}, None, "a tar keeps fields in the names of files, as UTF-8"),
        ("tar", {"key": "a" * (1 << 20), "x": b"1"}, None, "a file's name, which has at most 1048576 bytes"),
        ("tar", {"x": np.array([{}])}, None, "would be pickled"),
        ("tar", {"x": object()}, None, "sample '000000000', field 'x': object has no place in JSON"),
        ("tar", {"x": [{"a": {1: 2}}]}, None, "sample '000000000', field 'x': the key 1 would become a text"),
        ("parquet", {"x": {None: 2}}, None, "field 'x'.*: the key None would become a text"),
        ("parquet", {"x": {"a": {True: 2}}}, None, "field 'x'.*: the key True would become a text"),
        ("tar", {"key": "a", "x": "\ud800"}, None, "sample 'a', field 'x': 'utf-8' codec can't encode"),
        ("tar", {"key": "a", "x": torch.ones(2).bfloat16()}, None, "sample 'a', field 'x': .*BFloat16"),
        (
            "parquet",
            {"a": 1, "x": 1 << 70},
            None,
            r"field 'x': a value has no place in its Parquet column \(int64",
        ),
        ("parquet", {"a": 1, "x": "\ud800"}, None, r"field 'x': a value has no place in its Parquet column"),
        ("parquet", {"x": np.array(["a"])}, None, "field 'x': Parquet has no arrays of str"),
        (
            "parquet",
            {"x": 1},
            {"x": "a"},
            "field 'x' holds int in the samples that were looked at first, and text",
        ),
        ("parquet", {"x": 1}, {"x": 1, "y": 2}, "has the field 'y', which those looked at first have not"),
        ("parquet", {"x": np.zeros((2, 2))}, None, r"not arrays of shape \(2, 2\)"),
        ("parquet", {"x": np.zeros(2, np.float32)}, {"x": np.zeros(2)}, "an array of float64"),
        ("parquet", {"x": np.zeros(2, np.uint8)}, {"x": torch.tensor([300, 1])}, "an array of int64"),
        ("parquet", [1, 2], None, "a sample is a dict of fields, got list"),
        ("tar", {"key": "a\ud800", "x": 1}, None, "a tar keeps keys in the names of files, as UTF-8"),
        ("tar", {"key": b"\xff", "x": 1}, None, "a tar keeps keys in the names of files, as UTF-8"),
        ("tar", {"key": "b\0", "x": 1}, None, "which end at a null character"),
        ("parquet", {"x": torch.ones(2).bfloat16()}, None, "field 'x' has no place in a shard: .*BFloat16"),
        (
            "parquet",
            {"x": np.zeros(1, "M8[D]")},
            None,
            r"'x': Parquet has no arrays of datetime64\[D\]; .*int64",
        ),
        (
            "parquet",
            {"x": np.zeros(1, "M8[h]")},
            None,
            r"'x': Parquet has no arrays of datetime64\[h\]; .*int64",
        ),
        ("parquet", {}, None, "sample 0 has no fields"),
        *[(format, {"a": 1, 2: 3}, None, "names of fields are texts, got 2") for format in FORMATS],
        *[
            (format, {"x": torch.empty(2, device="meta")}, None, "field 'x'.*meta tensor")
            for format in FORMATS
        ],
        *[(format, {"x": np.ma.array([1, 2], mask=[0, 1])}, None, "field 'x'.*filled") for format in FORMATS],
    ],
)
def test_what_has_no_place_in_a_format_is_named(
    tmp_path: Path, format: str, first: Any, second: Any, message: str
) -> None:
    with (
        pytest.raises(DataError, match=message),
        pg.ShardWriter(tmp_path / "out", format) as writer,
    ):
        writer.write(first)
        if second is not None:
            writer.write(second)
    assert not list((tmp_path / "out").glob("*shard*"))


def test_what_a_tar_has_just_room_for_is_read_back(tmp_path: Path) -> None:
    many: list[dict[str, Any]] = [
        {"key": "a", "cls": b"cat", "label": b"x"},
        {"key": "b", **{f"f{n}": b"" for n in range(999)}},
        {"key": "c" * ((1 << 20) - 100), "x": b"1"},
        {"key": "d", "label": (1 << 64) - 1},
        {"key": "e", "label": -(1 << 63)},
        {"key": "f", "cls": b"18446744073709551616", "label": b"x"},
    ]
    with pg.ShardWriter(tmp_path / "out", "tar") as writer:
        for sample in many:
            writer.write(sample)
    assert samples(tmp_path / "out") == many


FIRST = {"int": [1, 2], "float": [0.5], "float32": np.ones(2, np.float32), "number": 0.5}
ODD = {
    "int": [[1.5, 2.0], [float("nan")], ["7"], [True], [None], (1.7,), [1e18], [2**63], [[1], [0.5]]],
    "float": [["1.5"], [True], [None], [2**60 + 1], [0.5, 2**60 + 1], [np.array([1])]],
    "float32": [[1e300], [2**25 + 1]],
    "number": [2**60 + 1],
}


@pytest.mark.parametrize(("first", "odd"), [(first, odd) for first in ODD for odd in ODD[first]], ids=str)
def test_numbers_that_would_change_are_refused(tmp_path: Path, first: str, odd: Any) -> None:
    writer = pg.ShardWriter(tmp_path / "out", format="parquet")
    writer.write({"v": FIRST[first]})
    with pytest.raises(DataError, match="field 'v' holds"), writer:
        writer.write({"v": odd})


def test_lists_of_numbers_that_fit_are_written(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"a": [1, 2], "b": [0.5], "c": np.ones(1, np.float32)},
        {"a": [], "b": [1, 2.5], "c": [0.1]},
        {"a": (np.int64(3),), "b": [float("nan"), float("inf")], "c": [2, -1]},
    ]
    with pg.ShardWriter(tmp_path / "out", format="parquet") as writer:
        for row in rows:
            writer.write(row)
    file = LocalFile(str(next((tmp_path / "out").glob("*.parquet"))))
    for row, found in zip(rows, format_of(file.name).samples(file), strict=True):
        for name, dtype in (("a", np.int64), ("b", np.float64), ("c", np.float32)):
            assert found[name].dtype == dtype
            np.testing.assert_array_equal(found[name], np.array(row[name], dtype))


def test_a_key_of_bytes_is_the_text_that_it_is(tmp_path: Path) -> None:
    with pg.ShardWriter(tmp_path / "out", "tar") as writer:
        writer.write({"key": b"abc", "x": b"1"})
    with LocalFile(tmp_path / "out" / "shard-000000.tar") as file:
        assert list(format_of("a.tar").samples(file)) == [{"key": "abc", "x": b"1"}]


def test_tensors_and_null_columns_can_be_written(tmp_path: Path) -> None:
    with pg.ShardWriter(tmp_path / "out", "parquet") as writer:
        writer.write({"t": torch.arange(3, dtype=torch.int16), "maybe": 1})
        writer.write({"t": torch.arange(2, dtype=torch.int16), "maybe": None})
    with LocalFile(tmp_path / "out" / "shard-000000.parquet") as file:
        first, second = format_of("a.parquet").samples(file)
    assert first["t"].dtype == np.int16
    assert (first["maybe"], second["maybe"]) == (1, None)


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_that_are_lazy_views_are_written_as_their_values(tmp_path: Path, format: str) -> None:
    given = torch.tensor([1 + 2j])
    tensors = [given.conj().imag, torch._neg_view(torch.ones(2))]
    if format == "tar":
        tensors.append(given.conj())
    assert all(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
    with pg.ShardWriter(tmp_path / "out", format) as writer:
        writer.write({f"t{number}": tensor for number, tensor in enumerate(tensors)})
    (found,) = samples(tmp_path / "out")
    for number, tensor in enumerate(tensors):
        value = found[f"t{number}"]
        np.testing.assert_array_equal(value, tensor.resolve_conj().resolve_neg().numpy())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("number", [torch.tensor(3), np.array(3), np.int64(3), torch.tensor([3])[0]])
def test_a_tensor_or_array_of_one_number_is_that_number(tmp_path: Path, format: str, number: Any) -> None:
    with pg.ShardWriter(tmp_path / "out", format) as writer:
        for label in (number, 4):
            writer.write({"label": label, "x": torch.tensor(0.5, dtype=torch.bfloat16), "ok": np.array(True)})
    suffix = next((tmp_path / "out").glob("shard*")).name
    with LocalFile(tmp_path / "out" / suffix) as file:
        first, second = format_of(suffix).samples(file)
    assert (first["label"], second["label"]) == (3, 4)
    assert (first["x"], first["ok"]) == (0.5, True)


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = pg.ShardWriter(tmp_path / "out")
    writer.write({"text": "a"})
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"No space left on device: '.*shard-000000"),
    ):
        patch.setattr(os, "write", full)
        writer.close()


def test_a_pack_onto_a_full_disk_says_what_is_there_and_how_it_continues(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, written = tmp_path / "out", 0
    really = os.write

    def write(fd: int, data: Any) -> int:
        nonlocal written
        written += len(data)
        if written > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(fd, data)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device") as caught:
        patch.setattr(os, "write", write)
        pack_shards(photos, target, size="40 kB", workers=1)
    (text,) = caught.value.__notes__
    finished = list(target.glob("shard*"))
    assert f"{str(target)!r} has no more room: {len(finished)} shards are there and stay" in text
    assert 0 < len(finished) < 10
    assert len(pack_shards(photos, target, size="40 kB", workers=1)) == 300


def test_a_writer_on_a_full_disk_says_how_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def write() -> None:
        with pg.ShardWriter(tmp_path / "out", size="4 kB") as writer:
            for number in range(20):
                if number == 10:
                    monkeypatch.setattr(os, "write", full)
                writer.write({"x": bytes(1000)})

    with pytest.raises(OSError, match="Disk quota exceeded") as caught:
        write()
    monkeypatch.undo()
    (text,) = caught.value.__notes__
    assert "has no more room: 4 shards are there and stay. Make room, and make the same call again" in text


def test_a_failure_in_a_worker_names_the_sample_and_leaves_no_processes(photos: Path, tmp_path: Path) -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 333:
                raise ValueError("broken row")
            return super().__getitem__(index)

    with pytest.raises(ValueError, match="broken row"):
        pack_shards(Broken(), tmp_path / "out", size="2 kB", workers=2)
    assert multiprocessing.active_children() == []
    (photos / "cats" / "0001").write_bytes(b"")
    with pytest.raises(
        DataError, match="a file's ending says what it is in its sample, and this one has none"
    ):
        pack_shards(photos, tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "zip"}, "format must be one of tar, parquet, got 'zip'"),
        ({"size": "large"}, "pack: size must be bytes or a size"),
        ({"workers": 0}, "workers must be an int >= 1, got 0"),
    ],
)
def test_arguments_that_are_none_are_refused(
    photos: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        pack_shards(photos, tmp_path / "out", **arguments)


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    for source, message in (
        (3, "a int cannot be packed"),
        ([], "no samples"),
        (["text"] and iter(["text"]), "got str"),
    ):
        with pytest.raises(DataError, match=message):
            pack_shards(source, tmp_path / "out", workers=1)
    with pytest.raises(DataError, match="no such folder"):
        pack_shards(tmp_path / "nothing", tmp_path / "other")


def test_a_folder_of_shards_is_refused_and_the_samples_of_its_graph_are_packed(
    photos: Path, tmp_path: Path
) -> None:
    pack_shards(photos, tmp_path / "sorted", size="100 kB", workers=1)
    with pytest.raises(DataError, match=r"holds the shard 'shard-000000\.tar'; .* a graph that reads them"):
        pack_shards(tmp_path / "sorted", tmp_path / "again")

    def again() -> Iterator[Any]:
        graph = pg.Graph("again")
        graph.add(ops.ShardSelect(tmp_path / "sorted", shuffle=True)).then(ops.Load())
        with graph.loader() as loader:
            yield from loader

    pack_shards(again, tmp_path / "again", size="100 kB")
    assert samples(tmp_path / "again") == expected(photos)


@pytest.mark.parametrize("complete", [True, False])
def test_what_a_kill_in_the_last_moment_leaves_is_removed(
    photos: Path, tmp_path: Path, complete: bool
) -> None:
    out = tmp_path / "out"
    pack_shards(photos, out, format="parquet", size="100 kB", workers=1)
    whole = shards(out)
    # Killed while the manifest or the settings were being written, or right behind them.
    for name in ("._manifest.json.0123456789ab", "._pack.json.0123456789ab"):
        (out / name).write_bytes(b"cut")
    (out / "_pack.json.partial").write_text(json.dumps({"settings": json.loads(whole["_pack.json"])}) + "\n")
    if not complete:
        (out / "_pack.json").unlink()
    pack_shards(photos, out, format="parquet", size="100 kB", workers=1)
    assert shards(out) == whole


def test_a_lock_on_a_file_that_lies_nowhere_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = pack_folder.try_exclusive

    def behind_the_other(fd: int) -> bool:
        monkeypatch.setattr(pack_folder, "try_exclusive", lock)
        (tmp_path / "_pack.json.partial").unlink()
        return lock(fd)

    monkeypatch.setattr(pack_folder, "try_exclusive", behind_the_other)
    with pg.ShardWriter(tmp_path) as writer:
        with pytest.raises(DataError, match="another process is packing"):
            pg.ShardWriter(tmp_path)
        writer.write({"n": 1})


def test_a_finished_shard_that_is_broken_is_written_again(photos: Path, tmp_path: Path) -> None:
    pack_shards(photos, tmp_path / "out", size="100 kB", workers=1)
    whole = shards(tmp_path / "out")
    os.rename(tmp_path / "out" / "_pack.json", tmp_path / "out" / "_pack.json.partial")
    record = json.dumps({"settings": json.loads(whole["_pack.json"])})
    (tmp_path / "out" / "_pack.json.partial").write_text(record)
    with (tmp_path / "out" / "shard-000001.tar").open("r+b") as file:
        file.truncate(30_000)
    pack_shards(photos, tmp_path / "out", size="100 kB", workers=1)
    assert shards(tmp_path / "out") == whole


def test_a_pack_that_another_process_ends_meanwhile_is_complete(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = pack_folder.PackFolder._opened

    def behind_the_other(self: Any) -> bool:
        monkeypatch.setattr(pack_folder.PackFolder, "_opened", opened)
        pack_shards(photos, tmp_path / "out", size="100 kB", workers=1)
        return opened(self)

    monkeypatch.setattr(pack_folder.PackFolder, "_opened", behind_the_other)
    manifest = pack_shards(photos, tmp_path / "out", size="100 kB", workers=1)
    assert len(manifest) == 300 and not list((tmp_path / "out").glob("*.partial"))


class Short:
    """Says that it has ten samples, and has no seventh."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 6:
            raise IndexError(number)
        return {"x": number}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_cannot_give_a_sample_is_told_which(
    tmp_path: Path, format: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IndexError) as caught:
        pack_shards(Short(), tmp_path / "out", format=format, workers=workers)
    assert caught.value.__notes__ == ["sample 6 of the source, which says that it has 10"]
    monkeypatch.setattr(pack, "_spread", lambda count: [0])
    with pytest.raises(IndexError) as caught:
        pack_shards(Short(), tmp_path / "again", format=format, workers=workers, size=10)
    assert caught.value.__notes__ == ["sample 6 of the source, which says that it has 10"]
