"""The table of trainers and cases: each row once in each epoch, and a resumed training equal to the uninterrupted one.

It is printed at the end. Lightning's part is ``test_lightning``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TRAININGS = [
    *(("ddp", ranks) for ranks in (1, 2)),
    *(("accelerate", ranks) for ranks in (1, 2)),
    *(("transformers", ranks) for ranks in (1, 2)),
    ("fsdp", 2),
]


@pytest.mark.parametrize(("trainer", "ranks"), TRAININGS)
def test_each_row_comes_once_per_epoch_and_a_resumed_training_equals_the_uninterrupted_one(
    trainer: str, ranks: int, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    if trainer in ("accelerate", "transformers") and importlib.util.find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}: make test-interop brings it")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [
            sys.executable,
            *(launcher if ranks > 1 else []),
            str(HERE / "trainings.py"),
            str(tmp_path),
            trainer,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rank0.json").read_text())
    record_property("table", (f"{trainer}, {ranks} rank{'s' * (ranks > 1)}", found))
    assert not {case: wrong for case, wrong in found.items() if wrong}
