"""Rows of Parquet shards reach a Batch as columns: the same batches as row by row."""

from itertools import chain

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, PARTS = 600, 4


def write(folder, rows=ROWS, **more):
    for part in range(PARTS):
        numbers = np.arange(part * rows, (part + 1) * rows)
        columns = {"id": numbers, "x": numbers.astype(np.float32) / 7, "even": numbers % 2 == 0, **more}
        pq.write_table(pa.table(columns), folder / f"part-{part}.parquet", row_group_size=100)
    return str(folder / "part-*.parquet")


def delivered(parts, through=None, **options):
    graph = pg.Graph("columns", seed=3)
    rows = graph.add(ops.ShardSelect(parts), name="select").then(ops.Load(), name="load", **options)
    if through is not None:
        rows = rows.then(through, name="through")
    rows.then(ops.Batch(64), name="batch")
    return graph


def same(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == two[name].dtype
            assert torch.equal(value, two[name]) or name == "x"
        else:
            assert value == two[name]


def batches(graph):
    with graph.loader(epochs=2) as loader:
        return [list(loader) for _ in range(2)]


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_those_made_row_by_row(tmp_path, workers):
    parts = write(tmp_path, text=[f"t{number}" for number in range(ROWS)], list=[[1, 2]] * ROWS)
    packed = batches(delivered(parts, workers=workers))
    by_row = batches(delivered(parts, through=lambda sample: sample))
    for one, two in zip(chain(*packed), chain(*by_row), strict=True):
        same(one, two)
    assert sorted(torch.cat([batch["id"] for batch in packed[0]]).tolist()) == list(range(ROWS * PARTS))
    assert packed[0][0]["id"].dtype == torch.int64 and packed[0][0]["x"].dtype == torch.float64


def test_a_graph_over_them_resumes_everywhere(tmp_path):
    parts = write(tmp_path, rows=120)
    pg.testing.assert_resumes_exactly(lambda: delivered(parts, workers=2))
