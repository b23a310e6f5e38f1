"""The script for a machine with a GPU: what it says without one, what it carries along, how it reads a trace."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path, programs: Any) -> None:
    program = f"import runpy, sys; sys.path.insert(0, {str(FOLDER)!r}); "
    program += f"runpy.run_path({str(FOLDER / 'gpu_check.py')!r}, run_name='__main__')"
    done = programs.run(program, "--results", tmp_path / "results")
    assert done.returncode == 2, done.stderr
    assert "there is no CUDA device here" in done.stdout
    assert not (tmp_path / "results").exists()


def test_it_runs_the_files_that_have_tests_for_a_gpu_and_both_benchmarks(load: Any, tmp_path: Path) -> None:
    found = dict(load("gpu_check").commands(tmp_path, cuda=False, slow=False))
    assert list(found) == ["tests", "host_to_device", "replica_parts cpu cpu"]
    files = [argument for argument in found["tests"] if argument.endswith(".py")]
    assert "tests/device/test_accelerator_copies.py" in files
    assert "tests/replicas/test_accelerator_replicas.py" in files
    assert "tests/replicas/test_executor_step.py" in files  # whose tests only use the fixture ``place``
    assert "tests/engine/test_tree.py" not in files
    assert all((FOLDER.parent / name).exists() for name in files)


def test_the_copy_benchmark_delivers_what_it_says(load: Any) -> None:
    host_to_device = load("host_to_device")
    with host_to_device.pipegraph("cpu", 4) as batches:
        batch = next(iter(batches))
    assert batch["image"].shape == (4, 224, 224, 3)
    assert (batch["image"] == 1).all()
    found = host_to_device.used("cpu", 4, batches=30)
    assert found["slabs"] <= found["planned_slabs"]
