"""All CUDA tests and GPU benchmarks on a machine with a GPU and a ``python3`` that has PyTorch, where nothing installs.

Beforehand, where there is a package index, put what the tests need besides into a folder of the checkout, for the other
machine's Python:

    python -m pip install --target build/gpu --no-deps --only-binary=:all: --python-version 3.12 \
        cloudpickle ddsketch six typing_extensions pytest pluggy iniconfig packaging pygments

There:

    python3 benchmarks/gpu_check.py --packages build/gpu --results out/gpu

Where ``PIPEGRAPH_TEST_IMAGES`` names a folder of photographs (and there is OpenCV), also ``gpu_training.py`` runs.

It writes to the folder of results: ``<date>-gpu_check.jsonl`` (one row: the machine, what ran, what came of it), the
tests' report (``tests.xml``, ``tests.log``), and each benchmark's own dated rows and output.

Exit status: 0 all passed; 1 something failed; 2 there is no CUDA device (``--allow-cpu`` rehearses what runs without
one, and then 0 and 1 mean what they say, for the CPU alone).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, NO_DEVICE = 0, 1, 2

LARGE = {
    "tests/images": ("cv2", "PIL"),
    "tests/device/test_bytes_written.py": ("PIL",),
    "tests/replicas/test_reducer.py": ("hypothesis",),
}
"""What the tests of a folder or file need besides, where a machine has it."""

ON_DEVICES = re.compile(
    r"mark\.(cuda|accelerator)"
    r'|usefixtures\([^)]*"(accelerator|place|races|simulated)"'
    r"|(def test_|fixture[^\n]*\n *def )\w+\([^)]*\b(accelerator|place: torch\.device|races|simulated)\b"
)
"""What makes a test one of those marked: the mark, or a fixture of tests/support/accelerators.py."""


def device() -> dict[str, Any]:
    """The GPU, as PyTorch sees it; empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda": torch.version.cuda,
    }


def tests() -> tuple[list[str], dict[str, str]]:
    """The files that have tests marked ``cuda`` or ``accelerator``, and those left out, with the reason."""
    files, left_out = [], {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if not ON_DEVICES.search(path.read_text()):
            continue  # it may import what is not needed here
        needed = [
            each for place, those in LARGE.items() if Path(name).is_relative_to(place) for each in those
        ]
        if missing := [each for each in needed if importlib.util.find_spec(each) is None]:
            left_out[name] = f"needs {', '.join(missing)}"
        else:
            files.append(name)
    return files, left_out


def commands(files: list[str], options: argparse.Namespace, gpu: dict[str, Any]) -> dict[str, list[str]]:
    """What runs, by name."""
    marked = "(cuda or accelerator)" if options.slow else "(cuda or accelerator) and not slow"
    # Warnings of versions that this project was not tested with are shown, and do not fail a test.
    run = ["-m", "pytest", *files, "-p", "no:cacheprovider", "-W", "default", "-m", marked, "-ra"]
    found = {"tests": [*run, f"--junitxml={options.results / 'tests.xml'}"]}
    sizes = ["cuda", "--batches", "200"] if gpu else ["cpu", "--batches", "20", "--rows", "16"]
    rounds = ["--rounds", "5" if gpu else "1"]
    found["host_to_device"] = ["benchmarks/host_to_device.py", *rounds, "--device", *sizes]
    pairs = [["cuda:0", "cuda:0"]] if gpu else [["cpu", "cpu"]]
    if gpu.get("count", 0) > 1:
        pairs.append(["cuda:0", "cuda:1"])
    for pair in pairs:
        steps = ["--steps", "20" if gpu else "1", "--devices", *pair]
        found[f"replica_parts {' '.join(pair)}"] = ["benchmarks/replica_parts.py", *rounds, *steps]
    if gpu and os.environ.get("PIPEGRAPH_TEST_IMAGES") and importlib.util.find_spec("cv2"):
        found["gpu_training"] = ["benchmarks/gpu_training.py", "--rounds", "3"]
    return {name: command for name, command in found.items() if options.only in name}


def run(name: str, arguments: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One command in a process of its own, in the checkout; its output goes to ``<name>.log``, its end is returned."""
    log = options.results / f"{re.sub('[ :]+', '-', name)}.log"
    paths = [str(ROOT), *map(str, filter(None, [options.packages, os.environ.get("PYTHONPATH")]))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment["PIPEGRAPH_RESULTS"] = str(options.results)  # read by records.py
    print(f"== {name}", flush=True)
    start = time.perf_counter()
    with log.open("w") as file:
        to = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
        try:
            status = subprocess.run([sys.executable, *arguments], timeout=options.limit, **to).returncode
        except subprocess.TimeoutExpired:
            status = -1
            file.write(f"\nstopped after {options.limit:.0f} s\n")
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    print(tail, flush=True)
    return {"name": name, "status": status, "seconds": round(time.perf_counter() - start, 1), "tail": tail}


def counts(report: Path) -> dict[str, int]:
    """Tests, failures, errors and skipped ones of a JUnit report, and how many ran; empty where there is none."""
    if not report.exists():
        return {}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    found = {name: sum(int(suite.get(name, "0")) for suite in suites) for name in names}
    return {**found, "ran": found["tests"] - found["skipped"]}


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--packages", type=Path, help="folder of packages that this machine lacks")
    day = datetime.now(UTC).date().isoformat()
    parser.add_argument(
        "--results", type=Path, default=ROOT / "out" / f"gpu-{day}", help="folder to write to"
    )
    parser.add_argument("--slow", action="store_true", help="also the tests marked slow (10,000 steps)")
    parser.add_argument("--allow-cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("--only", default="", help="a part of a command's name, such as tests")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for each command (default 540)")
    options = parser.parse_args()
    options.results = options.results.resolve()
    options.packages = options.packages and options.packages.resolve()
    gpu = device()
    if not gpu:
        print(
            "there is no CUDA device here (torch.cuda.is_available() is False): nothing of the GPU has been checked"
        )
        if not options.allow_cpu:
            raise SystemExit(NO_DEVICE)
        print("--allow-cpu: a rehearsal on the CPU; tests marked cuda will be skipped")
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "tests.xml").unlink(missing_ok=True)  # of an earlier run
    files, left_out = tests()
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", flush=True)
    outcomes = [run(name, command, options) for name, command in commands(files, options, gpu).items()]
    found = counts(options.results / "tests.xml")
    # With no GPU every test is skipped or deselected, which is no success of the tests: the row says how many ran.
    idle = gpu and any(each["name"] == "tests" for each in outcomes) and not found.get("ran")
    passed = bool(outcomes) and not idle and all(each["status"] == 0 for each in outcomes)
    os.environ["PIPEGRAPH_RESULTS"] = str(options.results)
    import records

    claim = "every test marked cuda passes, and the GPU benchmarks run"
    configuration = {"device": gpu or "none: a rehearsal on the CPU", "slow": options.slow}
    row = {
        "passed": passed,
        "tests": {**found, "left_out": left_out},
        "commands": outcomes,
    }
    print("recorded in", records.record("gpu_check", claim, configuration, row))
    print(json.dumps({"passed": passed, "device": gpu.get("name", "none"), "tests": row["tests"]}))
    raise SystemExit(PASSED if passed else FAILED)


if __name__ == "__main__":
    main()
