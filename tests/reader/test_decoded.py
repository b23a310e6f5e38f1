"""Shards that are decoded into memory: loaded as seldom as the limit allows, chosen by column and row, alike in all parts."""

import random
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError, ShardError, StateError

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
def test_columns_and_a_filter_hold_in_every_order(folder: Path, order: pg.order.Order) -> None:
    graph = graph_of(folder / "*.parquet", order, columns=["key"], filter=[("n", "<", 7)])
    with graph.loader() as loader:
        found = list(loader)
    assert sorted(sample["key"] for sample in found) == sorted(
        f"{p}-{i}" for p in range(PARTS) for i in range(7)
    )
    assert {tuple(sample) for sample in found} == {("key",)}


def test_a_filter_makes_the_length_unknown_and_columns_belong_to_the_digest(folder: Path) -> None:
    filtered = graph_of(folder / "*.parquet", filter=[("n", "<", 7)])
    with filtered.loader() as loader, pytest.raises(TypeError):
        len(loader)
    with filtered.loader(rank=0, world_size=2) as loader, pytest.raises(GraphError, match="equal_steps"):
        next(iter(loader))
    with graph_of(folder / "*.parquet").loader() as loader:
        state = loader.state_dict()
    with (
        graph_of(folder / "*.parquet", columns=["key"]).loader() as loader,
        pytest.raises(StateError, match="load"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("order", [pg.order.LaneOrder(), pg.order.PartOrder()], ids=["lanes", "parts"])
def test_a_part_with_other_fields_than_the_first_is_an_error_that_says_which(
    folder: Path, order: pg.order.Order
) -> None:
    table = pa.table({"key": ["odd"] * 3, "n": ["one"] * 3, "more": [1.0] * 3})
    pq.write_table(table, folder / "part-99.parquet")
    with graph_of(folder / "*.parquet", order).loader() as loader, pytest.raises(ShardError) as caught:
        list(loader)
    text = str(caught.value)
    assert "part-99.parquet: its fields differ from those of 'part-00.parquet'" in text
    assert "'x' is missing, 'more' is new, 'n' is text, not integer" in text
    assert "Load(columns=...)" in text
    with graph_of(folder / "*.parquet", order, columns=["key"]).loader() as loader:
        assert len(list(loader)) == PARTS * ROWS + 3
