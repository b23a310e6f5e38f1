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
