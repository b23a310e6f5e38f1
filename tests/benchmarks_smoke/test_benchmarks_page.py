"""Measurements in a child process, the page of a day, and the names of the set."""

from __future__ import annotations

import importlib
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("harness")


def ended(process: int) -> bool:
    """Wait for the end of a process that is no child of this one; False if it lives on."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 30)[0])
    finally:
        os.close(handle)


def test_a_child_that_hangs_is_ended_with_its_processes(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "pid"
    os.mkfifo(noted)
    workers: list[int] = []
    communicate = subprocess.Popen.communicate

    def when_it_hangs(child: Any, timeout: float | None = None) -> Any:
        if timeout is not None:
            workers.append(int(noted.read_text()))  # blocks until the child is there
            timeout = 0.01
        return communicate(child, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", when_it_hangs)
    program = (
        "import subprocess, sys, threading\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        f"with open({str(noted)!r}, 'w') as file: file.write(str(worker.pid))\n"
        "threading.Event().wait()"
    )
    with pytest.raises(RuntimeError, match="not done after 3 s"):
        harness.ask([sys.executable, "-c", program], limit_s=3)
    assert ended(workers[0])


def test_the_page_has_a_line_for_every_script_of_the_set(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = importlib.import_module("report")
    monkeypatch.setattr(importlib.import_module("records"), "RESULTS", tmp_path)
    ratio = {"median": 0.5, "low": 0.4, "high": 0.8}
    one = {"median": 1.0, "low": 1.0, "high": 1.0}
    contestants = {
        "hand-written loop": {"rate": one, "over": {"hand-written loop": one, "pipegraph": one}},
        "pipegraph": {"rate": one, "over": {"hand-written loop": ratio, "pipegraph": one}},
        "slow peer": {"rate": ratio, "over": {"hand-written loop": ratio, "pipegraph": ratio}},
    }
    results = {"contestants": contestants, "missing": {"other": "not installed"}}
    written = harness.record("tokens", "a claim", {"rounds": 3}, results)
    text = report.write(written.name[:10], tmp_path).read_text()
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "never recorded" in lines["A million rows of floats, shuffled"]
    assert "0.5 (0.4-0.8) x hand-written loop, 2 (1.25-2.5) x slow peer" in text
    assert "Not measured: other: not installed" in text
    assert "1 x the best peer: met, 2 " in lines["Windows of tokens from one long array"]
    assert "1 x the best peer: not measured" in lines["A million rows of floats, shuffled"]
    contestants["slow peer"]["over"]["pipegraph"] = {"median": 1.25, "low": 1.2, "high": 1.3}
    harness.record("tokens", "a claim", {"rounds": 3}, results)
    assert "1 x the best peer: **not met**, 0.8" in report.write(written.name[:10], tmp_path).read_text()
