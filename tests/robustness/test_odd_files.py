"""Files as people have them: pipes in folders, 16-bit images, damaged footers, names that are not UTF-8."""

from __future__ import annotations

import io
import json
import os
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StateError

ORDERS = [pg.order.LaneOrder(shuffle=False), pg.order.PartOrder(shuffle=False)]


def loaded(parts: Any, order: pg.order.Order = ORDERS[0]) -> list[Any]:
    graph = pg.Graph("parts")
    graph.add(ops.ShardSelect(parts, order=order)).then(ops.Load())
    with graph.loader() as loader:
        return list(loader)


def tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_scripts_and_dots_in_folders_make_the_key(
    tmp_path: Path, form: int, order: pg.order.Order
) -> None:
    folder = tmp_path / "with a space é [1] {2}"
    folder.mkdir()
    names = ["d" * 150 + "/" + "k" * 200, "日本/ключ é", "v1.0/a.b/x"]
    path = tar(folder / "a#b?c%20d.tar", [(f"{name}.txt", b"1") for name in names], form)
    assert [sample["key"] for sample in loaded(path, order)] == names


def test_parquet_with_nested_nullable_and_dictionary_columns_and_an_empty_row_group(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table(
        {
            "nested": [{"x": [1, 2]}, {"x": []}],
            "nullable": [1, None],
            "word": arrow.array(["a", "a"]).dictionary_encode(),
        }
    )
    with parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table.slice(0, 0))
        writer.write_table(table.slice(1))
    rows = [
        {"nested": {"x": [1, 2]}, "nullable": 1, "word": "a"},
        {"nested": {"x": []}, "nullable": None, "word": "a"},
    ]
    assert loaded(tmp_path / "a.parquet") == [*rows, rows[1]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b'\xef\xbb\xbf{"x":1}\r\n\r\n  \n{"x":2}', [1, 2]),
        ('{"x":"a\u2028b"}\n'.encode(), ["a\u2028b"]),
        (b'{"x":123456789012345678901234567890}\n', [123456789012345678901234567890]),
    ],
)
def test_lines_with_marks_blanks_and_odd_separators(
    tmp_path: Path, content: bytes, values: list[Any], order: pg.order.Order
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert [sample["x"] for sample in loaded(path, order)] == values


def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    os.mkfifo(tmp_path / "b.jpg")
    graph = pg.Graph("folder")
    graph.add(ops.ListFiles(tmp_path)).then(ops.Load(), on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert [sample["bytes"] for sample in loader] == [b""]
        (left_out,) = loader.profile().quarantined
    assert "no regular file" in left_out.error


def test_names_that_are_not_utf8_and_broken_links_are_skipped_and_kept_in_a_json_state(
    tmp_path: Path,
) -> None:
    with open(os.fsencode(tmp_path) + b"/bad\xff.jpg", "wb"):
        pass
    (tmp_path / "broken.jpg").symlink_to("nowhere")
    (tmp_path / "new\nline.jpg").write_bytes(b"1")
    graph = pg.Graph("folder")
    graph.add(ops.ListFiles(tmp_path)).then(ops.Load(), on_error=pg.Skip(1)).then(ops.Batch(3))
    with graph.loader() as loader:
        (batch,) = loader
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
    assert batch["bytes"] == [b"", b"1"] and batch["key"][0] == "bad\udcff.jpg"


def test_a_state_is_refused_where_the_folder_has_other_names_or_other_labels(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    for name in ("a/0.jpg", "a/1.jpg", "b/2.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")

    def made(root: Path, **options: Any) -> Any:
        graph = pg.Graph("folder")
        graph.add(ops.ListFiles(root, **options), name="files")
        return graph.loader()

    with made(folder) as loader:
        next(samples := iter(loader))
        state, rest = loader.state_dict(), [sample["key"] for sample in samples]
    folder = folder.rename(tmp_path / "there")
    with made(folder) as loader:
        loader.load_state_dict(state)
        assert [sample["key"] for sample in loader] == rest == ["a/1.jpg", "b/2.jpg"]
    with made(folder, classes=False) as loader, pytest.raises(StateError, match="'files' has other param"):
        loader.load_state_dict(state)
    (folder / "a/0.jpg").rename(folder / "b/3.jpg")  # now the first three samples are a/1, b/2, b/3
    names = r"stage 'files' has other .*3 files, whose names have the digest [0-9a-f]{12}\).*allow=\("
    with made(folder) as loader, pytest.raises(StateError, match=names):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (np.int64(3), 3),
        (b"ab", "b'ab'"),
        (Path("a"), "a"),
        (datetime(2020, 1, 1), "2020-01-01 00:00:00"),
        ((1, (2, np.str_("x"))), (1, (2, "x"))),
        (None, None),
    ],
)
def test_keys_of_any_kind_that_were_left_out_go_into_a_json_state(key: Any, shown: Any) -> None:
    def make() -> pg.Graph:
        graph = pg.Graph("keys")
        samples = [{"key": key, "x": x} for x in range(3)]
        graph.add(ops.FromIterable(samples)).then(lambda sample: 1 // sample["x"], on_error=pg.Skip(1))
        return graph

    with make().loader() as loader:
        assert next(iter(loader)) == 1
        state = json.dumps(loader.state_dict())
    with make().loader() as loader:
        loader.load_state_dict(json.loads(state))
        assert list(loader) == [0]
        (left_out,) = loader.profile().quarantined
    assert left_out.key == shown


def decoded(field: Any, **options: Any) -> Any:
    graph = pg.Graph("images")
    graph.add(ops.FromIterable([{"image": field}])).then(ops.DecodeImage(**options))
    with graph.loader() as loader:
        return next(iter(loader))["image"]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_of_grey_keep_their_upper_byte(kind: str) -> None:
    pil = pytest.importorskip("PIL.Image")
    pixels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    stream = io.BytesIO()
    pil.fromarray(pixels).save(stream, kind)
    made = decoded(stream.getvalue(), size=16)
    assert made[..., 0].tolist() == (pixels >> 8).tolist()


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("a/path.jpg", "got str; for a path put Load"),
        (None, "got NoneType"),
        (7, "got int"),
        (np.zeros((4, 5, 3), np.uint8), r"got an array of shape \(4, 5, 3\)"),
    ],
)
def test_what_holds_no_encoded_image_is_named(field: Any, names: str) -> None:
    with pytest.raises(pg.errors.DecodeError, match=names):
        decoded(field, size=8)
