"""Inside Ray Train: ranks found by themselves, states in checkpoints, another number of workers."""

import json
import os
import subprocess
import sys
from pathlib import Path


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
