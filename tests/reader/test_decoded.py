"""Shards that are decoded into memory: loaded as seldom as the limit allows, chosen by column and row, alike in all parts."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StateError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PARTS, ROWS = 20, 50


def graph_of(parts: Any, order: pg.order.Order | None = None, workers: int = 1, **load: Any) -> pg.Graph:
    graph = pg.Graph("decoded")
    select = ops.ShardSelect(parts, order=order)
    graph.add(select, name="select").then(ops.Load(**load), name="load", workers=workers)
    return graph


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty parts of one block of about 50 kB."""
    rng = random.Random(0)
    for part in range(PARTS):
        rows = [{"key": f"{part}-{i}", "n": i, "x": rng.randbytes(1_000)} for i in range(ROWS)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"part-{part:02}.parquet", compression="none")
    return tmp_path


@pytest.mark.parametrize("order", [pg.order.LaneOrder(), pg.order.PartOrder()], ids=["lanes", "parts"])
def test_columns_hold_in_every_order(folder: Path, order: pg.order.Order) -> None:
    graph = graph_of(folder / "*.parquet", order, columns=["key"])
    with graph.loader() as loader:
        found = list(loader)
    assert sorted(sample["key"] for sample in found) == sorted(
        f"{p}-{i}" for p in range(PARTS) for i in range(ROWS)
    )
    assert {tuple(sample) for sample in found} == {("key",)}


def test_whole_parts_of_several_blocks_give_each_sample_once(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4, dtype=np.uint8)[:, None].repeat(8_000_000, 1))
    with graph_of(tmp_path / "*.npy", pg.order.PartOrder()).loader() as loader:
        assert sorted(int(sample["array"][0]) for sample in loader) == [0, 1, 2, 3]


def test_columns_belong_to_the_digest(folder: Path) -> None:
    with graph_of(folder / "*.parquet").loader() as loader:
        state = loader.state_dict()
    with (
        graph_of(folder / "*.parquet", columns=["key"]).loader() as loader,
        pytest.raises(StateError, match="load"),
    ):
        loader.load_state_dict(state)
