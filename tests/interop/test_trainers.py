"""The examples of examples/trainers/, run for real: stopped in the middle of an epoch, resumed, every row once.

``make test-interop`` brings the trainers; those of torch alone run with the slow tests too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "trainers"
ROWS = 64

pytestmark = pytest.mark.slow


def run(script: str, folder: Path, *arguments: str, ranks: int = 0) -> str:
    """What an example prints; under torchrun with ``ranks``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPTS / f"with_{script}.py"), str(folder), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(folder: Path) -> list[list[list[int]]]:
    """The rows of each step, of each rank."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank*.jsonl"))
    ]


def rows(folder: Path) -> list[int]:
    return sorted(row for rank in steps(folder) for step in rank for row in step)


CASES: list[Any] = [
    ("lightning", 0),
    ("accelerate", 0),
    ("accelerate", 2),
    ("transformers", 0),
    ("ddp", 2),
    ("fsdp", 2),
]


@pytest.mark.parametrize(("script", "ranks"), CASES, ids=lambda value: str(value))
def test_a_run_stopped_in_the_middle_of_an_epoch_and_resumed_trains_on_every_row_once(
    tmp_path: Path, script: str, ranks: int
) -> None:
    if script in ("lightning", "accelerate", "transformers") and importlib.util.find_spec(script) is None:
        pytest.skip(f"needs {script}: make test-interop brings it")
    run(script, tmp_path, "--stop-after", "3", ranks=ranks)
    before = rows(tmp_path)
    assert 0 < len(before) < ROWS and len(set(before)) == len(before)
    said = run(script, tmp_path, "--resume", ranks=ranks)
    assert rows(tmp_path) == list(range(ROWS))
    if script in ("accelerate", "ddp"):
        assert "evaluated 61 rows, each once" in said


def test_a_resumed_run_takes_the_batches_that_the_whole_one_would_have_taken(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning: make test-interop brings it")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    run("lightning", whole)
    run("lightning", stopped, "--stop-after", "3")
    run("lightning", stopped, "--resume")
    assert steps(whole) == steps(stopped)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    run("fsdp", tmp_path, "--stop-after", "3", ranks=2)
    run("fsdp", tmp_path, "--resume", ranks=1)
    assert rows(tmp_path) == list(range(ROWS))


def test_a_stream_in_hugging_faces_trainer_resumes_where_it_stopped(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: make test-interop brings it")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    run("transformers", whole, "--stream")
    run("transformers", stopped, "--stream", "--stop-after", "3")
    run("transformers", stopped, "--stream", "--resume")
    assert steps(whole) == steps(stopped)
    assert rows(stopped) == list(range(ROWS))


def test_what_accelerate_loses_of_a_loader_is_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    import torch

    import pipegraph as pg
    from pipegraph import operators as ops

    monkeypatch.setattr(accelerate.data_loader, "DataLoader", pg.DataLoader)
    accelerator = accelerate.Accelerator(cpu=True)

    def kind() -> str:
        loader = accelerator.prepare(pg.DataLoader(range(8), 4, num_workers=1, workers="thread"))
        return str(loader.base_dataloader.workers)

    assert kind() == "process"
    monkeypatch.setitem(accelerate.data_loader._PYTORCH_DATALOADER_KWARGS, "workers", "process")
    assert kind() == "thread"
    graph = pg.Graph("numbers")
    graph.add(ops.FromSequence(range(8))).then(ops.Batch(4))
    with graph.loader() as loader:
        assert accelerator.prepare(loader) is loader
        assert not isinstance(loader, torch.utils.data.DataLoader)
