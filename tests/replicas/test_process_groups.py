"""Inside a process group: replicas first, then ranks. Two gloo processes run group_worker.py once for all tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCENARIOS = re.findall(r"@scenario\ndef (\w+)", (HERE / "group_worker.py").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("group")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "group_worker.py"),
                str(rank),
                str(folder / "store"),
                str(folder / f"{rank}"),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        said = [process.communicate()[0] for process in processes]
    found = []
    for rank in range(2):
        file = folder / f"{rank}"
        found.append(json.loads(file.read_text()) if file.exists() else {})
    if not all(found):
        pytest.fail("a rank died or hung:\n" + "\n".join(said))
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_holds_on_both_ranks(results: list[dict[str, str]], name: str) -> None:
    for rank, ended in enumerate(results):
        assert ended.get(name, "did not run") == "", f"rank {rank}: {ended.get(name, 'did not run')}"
