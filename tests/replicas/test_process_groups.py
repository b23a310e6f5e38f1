"""Inside a process group: replicas first, then ranks. Two gloo processes run group_worker.py once for all tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCENARIOS = re.findall(r"@scenario\ndef (\w+)", (HERE / "group_worker.py").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, programs: Any) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("group")
    program = f"import runpy; runpy.run_path({str(HERE / 'group_worker.py')!r}, run_name='__main__')"
    processes = [programs.start(program, rank, folder / "store", folder / f"{rank}") for rank in range(2)]
    said = [process.communicate()[1] for process in processes]
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
