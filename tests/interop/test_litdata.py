"""LitData's optimized data through its own ``StreamingDataset``, as docs/formats.md has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly

ROWS = 40


def row(number: int) -> dict[str, Any]:
    return {"number": number, "array": np.full(3, number)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_optimized_data_is_read_by_its_own_package_and_resumes(tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata", reason="make test-interop brings it")
    folder = str(tmp_path / "optimized")
    litdata.optimize(row, list(range(ROWS)), folder, chunk_size=8, num_workers=1, start_method="fork")

    def graph() -> pg.Graph:
        made = pg.Graph("litdata", seed=1)
        dataset = litdata.StreamingDataset(folder)
        made.add(ops.FromSequence(dataset, shuffle=True)).then(ops.Batch(6))
        return made

    with graph().loader() as loader:
        batches = list(loader)
    assert sorted(int(n) for batch in batches for n in batch["number"]) == list(range(ROWS))
    assert all((batch["array"][:, 0] == batch["number"]).all() for batch in batches)
    assert_resumes_exactly(graph)
