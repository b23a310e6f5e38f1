"""Inside Ray Train: ranks found by themselves, states in checkpoints, another number of workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly


@pytest.fixture(scope="module")
def rows(cluster):
    """A materialised dataset of 60 rows in several blocks."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"id": i, "text": f"row {i}", "values": [i, i + 0.5]} for i in range(60)]
    return ray.data.from_items(items, override_num_blocks=4).materialize()


def test_rows_of_a_data_set_come_in_their_order_and_in_any_other(rows):
    def ids(**options):
        graph = pg.Graph("rows", seed=1)
        graph.add(ops.FromRayData(rows, **options)).then(ops.Batch(7))
        with graph.loader() as loader:
            batches = list(loader)
        assert [text for batch in batches for text in batch["text"]] == [
            f"row {i}" for batch in batches for i in batch["id"].tolist()
        ]
        return [i for batch in batches for i in batch["id"].tolist()]

    assert ids() == list(range(60))
    shuffled = ids(shuffle=True)
    assert shuffled != list(range(60))
    assert sorted(shuffled) == list(range(60))


def test_rows_of_a_data_set_resume_exactly(rows):
    def make():
        graph = pg.Graph("rows", seed=1)
        graph.add(ops.FromRayData(rows, shuffle=True)).then(ops.Batch(9))
        return graph

    assert_resumes_exactly(make)


def test_a_trainer_with_two_workers_continues_with_three(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "trainers" / "with_ray.py"
    for arguments in (["--trainers", "2", "--stop-after", "5"], ["--trainers", "3"]):
        environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
        subprocess.run(
            [sys.executable, script, tmp_path, *arguments], env=environment, check=True, timeout=300
        )
    got = {path.stem: path.read_text().splitlines() for path in tmp_path.glob("*.jsonl")}
    assert {rank: len(steps) for rank, steps in got.items()} == {"rank0": 7, "rank1": 7, "rank2": 2}
    assert sorted(row for steps in got.values() for step in steps for row in json.loads(step)) == list(
        range(64)
    )
