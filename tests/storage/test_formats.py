"""Parquet, JSON lines, numpy and token files, folders: stream, blocks, random access."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipegraph.errors import DataError
from pipegraph.storage import shard_files
from pipegraph.storage.folders import list_files
from pipegraph.storage.formats import format_of
from pipegraph.storage.shard_files import BytesFile, LocalFile, OverlayFile
from tests.storage.reading_shards import check

LINES = [{"n": i, "text": "ü" * (i % 50)} for i in range(300)]


def jsonl(end: str = "\n") -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + end for line in LINES).encode()


def test_json_lines_are_their_objects() -> None:
    assert check("a.jsonl", jsonl(), LINES) > 10


@pytest.mark.parametrize(
    "change", [lambda b: b[:-1], lambda b: b + b"\n \n\n", lambda b: b.replace(b"\n", b"\r\n")]
)
def test_missing_ends_and_empty_lines_change_nothing(change: Callable[[bytes], bytes]) -> None:
    check("a.ndjson", change(jsonl()), LINES)


def test_packed_json_lines_are_one_block() -> None:
    assert check("a.jsonl.gz", gzip.compress(jsonl()[:100_0]) + gzip.compress(jsonl()[100_0:]), LINES) == 1


def test_zst_lines_may_lie_in_several_frames() -> None:
    zstandard = pytest.importorskip("zstandard")
    data = zstandard.compress(jsonl()[:5000]) + zstandard.compress(jsonl()[5000:])
    assert check("a.jsonl.zst", data, LINES) == 1


def test_parquet_rows_keep_their_types_and_row_groups_are_blocks() -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, object]] = [
        {
            "key": f"k{i}",
            "label": i,
            "jpg": bytes([i % 256]) * (i % 30),
            "embedding": [float(i), 0.5],
            "box": None if i % 7 == 0 else [1, i],
            "nested": {"a": [i], "b": None},
        }
        for i in range(1000)
    ]
    schema = pa.schema(
        [
            ("key", pa.string()),
            ("label", pa.int64()),
            ("jpg", pa.binary()),
            ("embedding", pa.list_(pa.float32(), 2)),
            ("box", pa.list_(pa.int32())),
            ("nested", pa.struct([("a", pa.list_(pa.int16())), ("b", pa.string())])),
        ]
    )
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), out, row_group_size=100)
    assert check("a.parquet", out.getvalue(), rows) == 10
    first = next(format_of("a.parquet").samples(BytesFile(out.getvalue())))
    assert np.float32 == first["embedding"].dtype
    assert first["embedding"].flags.writeable
    assert isinstance(first["jpg"], bytes)


def test_a_cached_parquet_block_needs_only_its_bytes_and_the_footer(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(50_000)}), path, row_group_size=10_000)
    form = format_of(path.name)
    with LocalFile(path) as whole:
        block = list(form.index(whole, 1))[3]
        (tmp_path / "block").write_bytes(whole.read_at(block.offset, block.nbytes))
        hollow = bytearray(path.read_bytes())
        hollow[4 : whole.size - 4096] = bytes(whole.size - 4100)
        with OverlayFile(BytesFile(bytes(hollow)), block.offset, LocalFile(tmp_path / "block")) as file:
            assert form.read(whole, block)[:] == form.read(file, block)[:]


def test_a_file_of_which_the_system_gives_little_at_once_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux gives at most 2 GiB at once: here as much as 7 bytes."""
    pread = shard_files.pread
    monkeypatch.setattr(shard_files, "pread", lambda fd, nbytes, offset: pread(fd, min(7, nbytes), offset))
    (tmp_path / "a").write_bytes(bytes(range(100)))
    with LocalFile(tmp_path / "a") as file:
        assert file.read_at(10, 50) == bytes(range(10, 60))


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_rows_of_an_npy_are_samples() -> None:
    array = np.arange(7 * 300, dtype=np.float32).reshape(300, 7)
    check("a.npy", npy(array), [{"array": row.tolist()} for row in array])


def test_a_flat_npy_gives_numbers() -> None:
    array = np.arange(300, dtype=np.int16)
    check("a.npy", npy(array), [{"array": n} for n in range(300)])
    sample = next(format_of("a.npy").samples(BytesFile(npy(array))))
    assert np.int16 == sample["array"].dtype


def test_an_unknown_suffix_names_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"no format for this suffix .*\.tar"):
        format_of("a.rar")


def test_folders_give_classes_in_sorted_order(tmp_path: Path) -> None:
    for name in ("dog/2.jpg", "cat/1.JPG", "cat/deep/3.jpg", "cat/.hidden.jpg", "dog/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    files = list_files(tmp_path, "*.jpg")
    assert files.paths == ("cat/1.JPG", "cat/deep/3.jpg", "dog/2.jpg")
    assert files.classes == ("cat", "dog")
    assert {"key": "dog/2.jpg", "path": str(tmp_path / "dog/2.jpg"), "label": 1} == files[2]
    assert "label" not in list_files(tmp_path, "*.jpg", classes=False)[0]


def test_a_flat_folder_has_no_classes(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    assert list_files(tmp_path).classes == ()
    with pytest.raises(DataError, match=r"'a.jpg' is in no class folder"):
        list_files(tmp_path, classes=True)
    with pytest.raises(DataError, match=r"no file in it matches '\*.png'"):
        list_files(tmp_path, "*.png")
