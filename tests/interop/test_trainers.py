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
import torch

import pipegraph as pg
from pipegraph import operators as ops

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


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Any:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr("accelerate.data_loader.DataLoader", pg.DataLoader)
    return accelerate.Accelerator(cpu=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_accelerate_replaces_says_so(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    import accelerate.data_loader

    monkeypatch.setattr(accelerate.data_loader, "DataLoader", torch.utils.data.DataLoader)
    with pytest.warns(
        pg.errors.PipegraphWarning, match=r"set accelerate\.data_loader\.DataLoader = pg\.Data"
    ):
        hugging_face.prepare(pg.DataLoader(range(8), 4, num_workers=workers))
    with (
        pytest.warns(pg.errors.PipegraphWarning, match="without pipegraph's workers"),
        pytest.raises(ValueError, match="thread"),
    ):
        hugging_face.prepare(pg.DataLoader(range(8), 4, num_workers=1, workers="thread"))


# -- Hugging Face's Trainer --------------------------------------------------------------------


def trainer(folder: Path, loader: Any = None, dataset: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    """A ``Trainer``, and the rows that it will have trained on."""
    transformers = pytest.importorskip("transformers")
    rows: list[Any] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, row: Any, **_: Any) -> dict[str, Any]:
            rows.append(row.tolist())
            return {"loss": self.layer(row[:, None].float()).mean()}

    on_loader = type("Trainer", (pg.TrainOnLoader, transformers.Trainer), {})
    kind = transformers.Trainer if loader is None else on_loader
    arguments = transformers.TrainingArguments(
        str(folder),
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", **options},
    )
    given = {} if loader is None else {"loader": loader}
    if dataset:
        given["train_dataset"] = dataset
    return kind(Model(), arguments, **given), rows


def rows_loader(rows: int = 12) -> Any:
    graph = pg.Graph("rows")
    graph.add(ops.FromSequence([{"row": row} for row in range(rows)], shuffle=True)).then(ops.Batch(4))
    return graph.loader(epochs=5)


def test_a_checkpoint_without_a_loaders_state_is_refused(tmp_path: Path) -> None:
    with rows_loader() as loader:
        saving, _ = trainer(tmp_path, loader, max_steps=2, save_steps=2)
        saving.train()
        (tmp_path / "checkpoint-2" / "loader0.pt").unlink()
        resumed, _ = trainer(tmp_path, loader, max_steps=4)
        with pytest.raises(pg.errors.StateError, match=r"loader0\.pt does not exist"):
            resumed.train(resume_from_checkpoint=True)
