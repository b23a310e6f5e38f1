"""The script for a machine with a GPU: what it says without one, what it carries along, how it reads a trace."""

from __future__ import annotations

import importlib
import re
import tomllib
import zipfile
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


def test_it_finds_the_file_of_every_marked_test_of_this_run(
    load: Any, request: pytest.FixtureRequest
) -> None:
    marked = {
        item.path.relative_to(FOLDER.parent).as_posix()
        for item in request.session.items
        if item.get_closest_marker("cuda") or item.get_closest_marker("accelerator")
    }
    assert marked <= set(load("gpu_check").cuda_tests())


def test_files_that_need_what_is_not_there_are_left_out_by_name(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_check = load("gpu_check")
    monkeypatch.setattr(gpu_check, "LARGE", {"tests/replicas": ("torch", "pipegraph_absent")})
    name = "tests/replicas/test_accelerator_replicas.py"
    assert name in gpu_check.cuda_tests()
    assert gpu_check.left_out(name) == ["pipegraph_absent"]
    assert name not in dict(gpu_check.commands(tmp_path, cuda=False, slow=False))["tests"]


def test_all_that_pipegraph_depends_on_can_be_carried_along(load: Any) -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    assert names - {"torch", "numpy"} <= set(load("gpu_check").NEEDED.values())


def test_what_is_not_installed_comes_from_its_wheel(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_check = load("gpu_check")
    assert gpu_check.missing() == []
    monkeypatch.setitem(gpu_check.NEEDED, "pipegraph_absent", "pipegraph_absent")
    assert gpu_check.missing() == ["pipegraph_absent"]
    with zipfile.ZipFile(tmp_path / "pipegraph_absent-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pipegraph_absent.py", "here = True\n")
    with gpu_check.unpacked(tmp_path, gpu_check.missing()) as folder:
        assert (folder / "pipegraph_absent.py").read_text() == "here = True\n"
    assert not folder.exists()
    with pytest.raises(SystemExit, match="neither installed nor in"), gpu_check.unpacked(None, ["nothing"]):
        pass


def test_a_trace_tells_what_the_busiest_stream_waited_for(load: Any) -> None:
    def kernel(stream: int, start: float, duration: float) -> dict[str, Any]:
        return {"cat": "kernel", "args": {"stream": stream}, "ts": start, "dur": duration}

    events = [
        kernel(7, 0, 1000),
        kernel(7, 1010, 990),  # 10 us between launches
        kernel(7, 2500, 500),  # 500 us of waiting
        kernel(20, 2100, 300),  # another stream's
        {"cat": "gpu_memcpy", "args": {"stream": 20}, "ts": 2000, "dur": 500},
    ]
    found = load("host_to_device").stalls({"traceEvents": events})
    assert found == {"span_us": 3000, "busy_us": 2490, "waits_us": 500, "waits": 1, "longest_us": 500}
    with pytest.raises(ValueError, match="no kernels"):
        load("host_to_device").stalls({"traceEvents": []})


def test_the_copy_benchmark_delivers_what_it_says(load: Any) -> None:
    host_to_device = load("host_to_device")
    with host_to_device.pipegraph("cpu", 4) as batches:
        batch = next(iter(batches))
    assert batch["image"].shape == (4, 224, 224, 3)
    assert (batch["image"] == 1).all()
    found = host_to_device.used("cpu", 4, batches=30)
    assert found["slabs"] <= found["planned_slabs"]
