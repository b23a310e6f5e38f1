"""Columns in the names of folders (``label=3/part-0.parquet``), as pyarrow reads them."""

from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ORDERS = [pg.order.LaneOrder(), pg.order.PartOrder(shuffle=False), pg.order.PartOrder()]


def written(folder: Path, values: list[str], name: str = "label") -> Path:
    for number, value in enumerate(values):
        place = folder / "year=2024" / f"{name}={value}"
        place.mkdir(parents=True)
        pq.write_table(pa.table({"x": [10 * number, 10 * number + 1]}), place / "part-0.parquet")
    return folder


def read(parts: Any, order: pg.order.Order | None = None, **load: Any) -> list[dict[str, Any]]:
    graph = pg.Graph("hive")
    graph.add(ops.ShardSelect(parts, order=order)).then(ops.Load(**load))
    with graph.loader() as loader:
        return sorted(loader, key=lambda row: row.get("x", 0))


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize(
    "values",
    [["0", "7"], ["01", "-2"], ["a", "1"], ["1", "__HIVE_DEFAULT_PARTITION__"], ["a%20b", "x=y"]]
    + [["3000000000", "1"], ["+1", "2"], ["1.5", "2"]],
)
def test_key_value_folders_are_columns_as_pyarrow_reads_them(
    values: list[str], order: pg.order.Order, tmp_path: Path
) -> None:
    folder = written(tmp_path / "data", values)
    expected = sorted(pq.read_table(folder).to_pylist(), key=lambda row: row["x"])
    assert read(folder / "**" / "*.parquet", order) == expected
    assert len(expected) == 4 and expected[0].keys() == {"x", "year", "label"}
