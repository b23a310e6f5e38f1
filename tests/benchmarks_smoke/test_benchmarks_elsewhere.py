"""Contestants of other environments: what a child answers, how its failures show, how its rows are joined."""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import argparse, sys
sys.path.insert(0, {folder!r})
import elsewhere, harness
from contextlib import contextmanager

@contextmanager
def stream():
    yield iter(range(100))

@contextmanager
def broken():
    raise ValueError("no such file")
    yield

parser = argparse.ArgumentParser()
elsewhere.add_options(parser)
options = parser.parse_args()
entered = [harness.Contestant(name, stream, 1, 10, 2.0) for name in ("ideal", "peer")]
entered.append(harness.Contestant("broken", broken, 1, 10))
print("noise of a library")
elsewhere.answer(entered, lambda contestant: "fine", options.child, options.ask)
"""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("elsewhere")


@pytest.fixture
def far(tmp_path: Path) -> str:
    """An interpreter in an environment of its own, with a package that is not here."""
    environment = tmp_path / ".venv-far"
    (environment / "bin").mkdir(parents=True)
    (environment / "far_peer.py").write_text("")
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={environment} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(folder=str(FOLDER)))
    return str(path)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('print(\'{"error": "ValueError: bad"}\')', "ValueError: bad"),
        ("raise SystemExit('out of luck')", "exit status 1: out of luck"),
        ("print('done')", "exit status 0: no message"),
        ("import os; os.abort()", "exit status -6"),
    ],
)
def test_a_child_that_fails_is_named_with_its_reason(elsewhere: Any, program: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        elsewhere.ask([sys.executable, "-c", program])


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
    elsewhere: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        elsewhere.ask([sys.executable, "-c", program], limit_s=3)
    assert ended(workers[0])


def test_peers_of_another_environment_run_there_behind_a_yardstick(
    elsewhere: Any, far: str, script: str
) -> None:
    needs = {"peer": "far_peer", "here": "json", "nowhere": "no_such_package"}
    entered, environments, missing = elsewhere.enter(script, [], needs, "ideal", [far])
    assert [entrant.name for entrant in entered] == ["ideal (far)", "peer"]
    assert environments == {"far": ["ideal (far)", "peer"]}
    assert missing == {"nowhere": "no_such_package is installed neither here nor in an --other interpreter"}
    assert entered[0].check().startswith("fine (far: as here")
    run = entered[1].measure()
    assert run.units == 20
    assert run.wall_s > 0


def test_rows_of_another_environment_are_joined_with_its_own_yardstick(
    elsewhere: Any, far: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = importlib.import_module("harness")
    monkeypatch.setattr(importlib.import_module("records"), "RESULTS", tmp_path)
    entered, environments, missing = elsewhere.enter(
        script, [], {"peer": "far_peer", "broken": "far_peer", "absent": "no_such_package"}, "ideal", [far]
    )
    options = harness.arguments("").parse_args(["--rounds", "2"])
    harness.compare(
        "joined", "a claim", {}, entered, lambda c: c.check(), ["ideal (far)"], "items", options,
        environments, missing,
    )  # fmt: skip
    (path,) = tmp_path.glob("*-joined.jsonl")
    results = json.loads(path.read_text())["results"]
    there = results["environments"]["far"]["over_yardstick_there"]
    assert there["peer"]["low"] > 0
    assert there["broken"] is None
    assert results["missing"].keys() == {"absent", "broken"}
    assert "not measured" not in results["checks"]["peer"]


def test_a_yardstick_of_another_environment_comes_with_its_contestants_and_only_with_them(
    elsewhere: Any, far: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = importlib.import_module("harness")
    entered, environments, _ = elsewhere.enter(script, [], {"peer": "far_peer"}, "ideal", [far])
    for only, names in (("peer", ["ideal (far)", "peer"]), ("ideal", [])):
        options = harness.arguments("").parse_args(["--rounds", "1", "--no-record", "--only", only])
        harness.compare(
            "joined", "", {}, entered, lambda c: "fine", ["ideal (far)"], "items", options, environments
        )
        checked = [line for line in capsys.readouterr().out.splitlines() if "check:" in line]
        assert [line.split(":")[1].removesuffix("fine").strip() for line in checked] == names


def test_the_page_has_a_line_for_every_script_of_the_set(
    elsewhere: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = importlib.import_module("report")
    monkeypatch.setattr(importlib.import_module("records"), "RESULTS", tmp_path)
    harness = importlib.import_module("harness")
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


def test_names_that_are_not_in_the_set_are_refused(elsewhere: Any) -> None:
    run_all = importlib.import_module("run_all")
    with pytest.raises(SystemExit, match="not in the set: tokenz"):
        run_all.chosen("tokenz", "", True)
    names = [entry.record for entry in run_all.chosen("tokens,image_recipe", "tokens", True)]
    assert names == ["image_recipe"]
    assert os.path.exists(FOLDER / "image_recipe.py")
