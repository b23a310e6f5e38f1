"""Shards that we write: read by our own readers, by tarfile and pyarrow, and the same however they came about."""

import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError, LoaderClosedError
from pipegraph.storage import build_manifest, pack_shards
from pipegraph.storage.manifest import Manifest
from pipegraph.storage.writing.pack import PackProgress
from tests.storage.reading_shards import written as samples

FORMATS = ["tar", "parquet"]
SLOWLY = ["tar", pytest.param("parquet", marks=pytest.mark.matrix)]
"""Where each starts processes several times."""


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


@pytest.mark.parametrize("format", SLOWLY)
def test_a_folder_of_files_is_read_back(photos: Path, tmp_path: Path, format: str) -> None:
    pack_shards(photos, tmp_path / "out", format=format, size="100 kB")
    assert len(list((tmp_path / "out").glob("shard*"))) > 4
    assert samples(tmp_path / "out") == expected(photos)


@pytest.mark.parametrize("format", FORMATS)
def test_the_manifest_is_what_an_index_finds(photos: Path, tmp_path: Path, format: str) -> None:
    manifest = pack_shards(photos, tmp_path / "out", format=format, size="100 kB")
    found = build_manifest(sorted((tmp_path / "out").glob(f"shard*.{format}")))
    assert found == manifest == Manifest.load(tmp_path / "out" / "_manifest.json")
    assert np.array_equal(found.block_crc32c, manifest.block_crc32c)
    assert np.array_equal(found.block_nbytes, manifest.block_nbytes)


def test_the_names_of_classes_are_in_the_manifest_of_a_pack(photos: Path, tmp_path: Path) -> None:
    pack_shards(photos, tmp_path / "out", size="100 kB")
    assert ops.ShardSelect(tmp_path / "out").classes == ("cats", "dogs") == ops.ListFiles(photos).classes


def test_shards_of_files_keep_to_their_size(photos: Path, tmp_path: Path) -> None:
    pack_shards(photos, tmp_path / "out", size="100 kB")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert max(sizes) <= 100_000 + 1024  # the mark of its end
    assert min(sizes[:-1]) > 90_000


def test_tarfile_reads_our_tars(photos: Path, tmp_path: Path) -> None:
    pack_shards(photos, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as archive:
        members = archive.getmembers()
        assert len(members) == 900
        assert {(m.mtime, m.uid, m.gid, m.mode, m.isreg()) for m in members} == {(0, 0, 0, 0o444, True)}
        first = archive.extractfile("dogs/0000.jpg")
        assert first is not None
        assert first.read() == (photos / "dogs" / "0000.jpg").read_bytes()


def test_pyarrow_reads_our_parquet(photos: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pack_shards(photos, tmp_path / "out", format="parquet")
    rows = pq.read_table(tmp_path / "out" / "shard-000000.parquet").to_pylist()
    assert sorted(rows, key=lambda row: row["key"]) == expected(photos)


def test_a_shuffle_keeps_every_sample_and_follows_from_its_seed(photos: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pack_shards(photos, tmp_path / name, size="100 kB", shuffle=seed)
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


def test_a_stream_is_written_in_its_order(tmp_path: Path) -> None:
    def made() -> Iterator[dict[str, Any]]:
        return ({"n": number, "text": "a" * number} for number in range(100))

    manifest = pack_shards(made, tmp_path / "out", format="parquet", size="1 kB")
    assert len(manifest) == 100
    assert len(manifest.parts) > 3
    with pytest.raises(GraphError, match="a stream cannot be shuffled as it passes; write it to shards"):
        pack_shards(made, tmp_path / "other", shuffle=1)


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


KILLED = """
import sys
from pipegraph.storage import pack_shards
def report(state):
    print(state.shards, flush=True)
pack_shards(sys.argv[1], sys.argv[2], format=sys.argv[3], size="30 kB", progress=report)
"""


@pytest.mark.parametrize("format", SLOWLY)
def test_a_pack_that_is_killed_again_and_again_ends_with_the_same_shards(
    photos: Path, tmp_path: Path, format: str, programs: Any
) -> None:
    pack_shards(photos, tmp_path / "whole", format=format, size="30 kB")
    for _ in range(2):
        with programs.start(KILLED, photos, tmp_path / "killed", format) as process:
            process.readline()
            process.readline()
            process.kill()
    assert (tmp_path / "killed" / "_pack.json.partial").exists()
    written = {path: path.stat().st_ino for path in (tmp_path / "killed").glob("shard*")}
    assert written
    pack_shards(photos, tmp_path / "killed", format=format, size="30 kB")
    assert written == {path: path.stat().st_ino for path in written}
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")


def test_a_complete_pack_is_left_as_it_is_and_other_settings_are_an_error(
    photos: Path, tmp_path: Path
) -> None:
    manifest = pack_shards(photos, tmp_path / "out", size="100 kB")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert pack_shards(photos, tmp_path / "out", size="100 kB") == manifest
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
        if state.shards == 2:
            raise Stop

    with pytest.raises(Stop):
        pack_shards(photos, tmp_path / "out", size="30 kB", progress=stop)
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


def test_a_writer_resumes_behind_its_last_whole_shard(tmp_path: Path) -> None:
    rows = [{"key": f"{number:03d}", "data": bytes([number]) * 1000} for number in range(100)]

    def write(folder: str, stop: int | None) -> int:
        with pg.ShardWriter(tmp_path / folder, size="10 kB") as writer:
            begun = writer.written
            for number, row in enumerate(itertools.islice(rows, begun, None)):
                if begun + number == stop:
                    raise KeyboardInterrupt
                writer.write(row)
        assert writer.written == 100
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
        ("tar", {"key": "a", "x\ud800": b"1"}, None, "a tar keeps fields in the names of files, as UTF-8"),
        (
            "parquet",
            {"a": 1, "x": 1 << 70},
            None,
            "field 'x': of 1 samples up to this one, a value has no place in its Parquet column",
        ),
        ("tar", {"key": "a\ud800", "x": 1}, None, "a tar keeps keys in the names of files, as UTF-8"),
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


def test_a_failure_names_the_sample(photos: Path, tmp_path: Path) -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 333:
                raise ValueError("broken row")
            return super().__getitem__(index)

    with pytest.raises(ValueError, match="broken row") as caught:
        pack_shards(Broken(), tmp_path / "out", size="2 kB")
    assert "sample 333 of the source" in caught.value.__notes__[0]
    (photos / "cats" / "0001").write_bytes(b"")
    with pytest.raises(
        DataError, match="a file's ending says what it is in its sample, and this one has none"
    ):
        pack_shards(photos, tmp_path / "other")
