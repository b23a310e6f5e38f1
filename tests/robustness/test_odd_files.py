"""Files as people have them: pipes in folders, 16-bit images, damaged footers, names that are not UTF-8."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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


def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    os.mkfifo(tmp_path / "b.jpg")
    graph = pg.Graph("folder")
    graph.add(ops.ListFiles(tmp_path)).then(ops.Load(), on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert [sample["bytes"] for sample in loader] == [b""]
        (left_out,) = loader.profile().quarantined
    assert "no regular file" in left_out.error


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
