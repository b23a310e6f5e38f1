"""All CUDA tests and GPU benchmarks on a machine with a GPU and a ``python3`` that has PyTorch, where nothing installs.

Beforehand, where there is a package index, with the other machine's Python (and its platform, as pip names it):

    python benchmarks/gpu_check.py --pack build/gpu-wheels --python 3.12

There, with the wheels in the same folder of the checkout:

    python3 benchmarks/gpu_check.py --wheels build/gpu-wheels --results out/gpu

Where ``PIPEGRAPH_TEST_IMAGES`` names a folder of photographs (and there is OpenCV), also ``gpu_training.py`` runs.

It writes to the folder of results: ``<date>-gpu_check.jsonl`` (one row: the machine, what ran, what came of it), the
tests' report (``tests.xml``, ``tests.log``), each benchmark's own dated rows and output, and the profiler's trace.
Packages that the machine has are used as they are; from the wheels comes only what it lacks.

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
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, NO_DEVICE = 0, 1, 2

NEEDED = {
    "cloudpickle": "cloudpickle",
    "ddsketch": "ddsketch",
    "six": "six",  # ddsketch's own
    "typing_extensions": "typing_extensions",
    "pytest": "pytest",
    "_pytest": "pytest",
    "pluggy": "pluggy",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pygments": "pygments",
}
"""Modules that the tests and pipegraph import, beside torch and numpy, and the distribution that brings each."""

PYTEST = {"pytest", "pluggy", "iniconfig", "packaging", "pygments"}

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

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True)
class Outcome:
    """One command: its exit status, seconds, and the end of what it printed."""

    name: str
    status: int
    seconds: float
    tail: str


def pack(folder: Path, python: str, platforms: Sequence[str]) -> None:
    """Download wheels for a Python of that version, ``folder`` then holds one of each distribution."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        "--dest",
        str(folder),
    ]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, *sorted(set(NEEDED.values()))], check=True)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size:>10,}  {name}")
    print(f"{sum(sizes.values()):>10,}  bytes in {folder}")


def missing() -> list[str]:
    """Distributions of which a module cannot be found here; pytest comes with all that it needs, of one time."""
    lacking = {NEEDED[name] for name in NEEDED if importlib.util.find_spec(name) is None}
    return sorted(lacking | (PYTEST if "pytest" in lacking else set()))


@contextmanager
def unpacked(wheels: Path | None, wanted: Sequence[str]) -> Iterator[Path | None]:
    """A folder with the wanted distributions, from their wheels, for as long as the block runs.

    Raises:
        SystemExit: a wheel is not there.
    """
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="pipegraph-wheels-") as folder:
        for name in wanted:
            found = [] if wheels is None else sorted(wheels.glob(f"{name}-*.whl"))
            if not found:
                raise SystemExit(
                    f"{name} is neither installed nor in {wheels}: fill a folder with --pack, and name it with --wheels"
                )
            with zipfile.ZipFile(found[-1]) as wheel:
                wheel.extractall(folder)
        yield Path(folder)


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


def cuda_tests() -> list[str]:
    """The files that have tests marked ``cuda`` or ``accelerator``: others import what is not needed here."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return [name for name in files if ON_DEVICES.search((ROOT / name).read_text())]


def left_out(name: str) -> list[str]:
    """Modules for want of which a file of tests cannot be run here; they are too large to carry along."""
    needed = [each for place, those in LARGE.items() if Path(name).is_relative_to(place) for each in those]
    return [each for each in needed if importlib.util.find_spec(each) is None]


def commands(results: Path, cuda: bool, slow: bool) -> list[tuple[str, list[str]]]:
    """What runs, by name."""
    marked = "(cuda or accelerator)" if slow else "(cuda or accelerator) and not slow"
    files = [name for name in cuda_tests() if not left_out(name)]
    tests = ["-m", "pytest", *files, "-p", "no:cacheprovider"]
    # Warnings of versions that this project was not tested with are shown, and do not fail a test.
    tests += ["-W", "default", "-m", marked, f"--junitxml={results / 'tests.xml'}", "-ra"]
    rounds = ["--rounds", "5" if cuda else "1"]
    copies = ["--device", "cuda" if cuda else "cpu", "--batches", "200" if cuda else "20"]
    if cuda:
        copies += ["--trace", str(results / "host_to_device_trace.json")]
    else:
        copies += ["--rows", "16"]
    found = [("tests", tests), ("host_to_device", ["benchmarks/host_to_device.py", *rounds, *copies])]
    pairs = [["cuda:0", "cuda:0"]] if cuda else [["cpu", "cpu"]]
    if cuda and device()["count"] > 1:
        pairs.append(["cuda:0", "cuda:1"])
    for pair in pairs:
        model = ["--model", "resnet18" if cuda else "mlp", "--steps", "20" if cuda else "3"]
        found.append(
            (
                f"replica_parts {' '.join(pair)}",
                ["benchmarks/replica_parts.py", *rounds, *model, "--devices", *pair],
            )
        )
    if cuda and os.environ.get("PIPEGRAPH_TEST_IMAGES") and importlib.util.find_spec("cv2"):
        found.append(("gpu_training", ["benchmarks/gpu_training.py", "--rounds", "3"]))
    return found


def run(name: str, arguments: Sequence[str], results: Path, extra: Path | None, limit_s: float) -> Outcome:
    """One command in a process of its own, in the checkout; its whole output goes to ``<name>.log``."""
    log = results / f"{name.split()[0]}{'-' + name.split()[-1].replace(':', '') if ' ' in name else ''}.log"
    paths = [str(ROOT), *([str(extra)] if extra else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment["PIPEGRAPH_RESULTS"] = str(results)  # read by records.py
    print(f"== {name}", flush=True)
    start = time.perf_counter()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
            file.write(f"\nstopped after {limit_s:.0f} s\n")
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    print(tail, flush=True)
    return Outcome(name, status, round(time.perf_counter() - start, 1), tail)


def counts(report: Path) -> dict[str, int]:
    """Tests, failures, errors and skipped ones of a JUnit report; empty where there is none."""
    if not report.exists():
        return {}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    found = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in found:
            found[name] += int(suite.get(name, "0"))
    return found


def check(
    results: Path, wheels: Path | None, allow_cpu: bool, slow: bool, limit_s: float, only: str = ""
) -> int:
    """Run everything and write the row. Returns the exit status."""
    gpu = device()
    if not gpu:
        print(
            "there is no CUDA device here (torch.cuda.is_available() is False): nothing of the GPU has been checked"
        )
        if not allow_cpu:
            return NO_DEVICE
        print("--allow-cpu: a rehearsal on the CPU; tests marked cuda will be skipped")
    results.mkdir(parents=True, exist_ok=True)
    (results / "tests.xml").unlink(missing_ok=True)  # of an earlier run
    wanted = missing()
    print(f"from wheels: {', '.join(wanted) or 'nothing'}", flush=True)
    skipped = {name: f"needs {', '.join(left_out(name))}" for name in cuda_tests() if left_out(name)}
    for name, why in skipped.items():
        print(f"left out: {name}: {why}", flush=True)
    with unpacked(wheels, wanted) as extra:
        outcomes = [
            run(name, arguments, results, extra, limit_s)
            for name, arguments in commands(results, bool(gpu), slow)
            if only in name
        ]
    tests = counts(results / "tests.xml")
    # With no GPU every test is skipped or deselected, which is no success of the tests: the row says how many ran.
    ran = tests.get("tests", 0) - tests.get("skipped", 0)
    tested = any(outcome.name == "tests" for outcome in outcomes)
    passed = bool(outcomes) and all(outcome.status == 0 for outcome in outcomes)
    passed = passed and (ran > 0 or not tested or not gpu)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    os.environ["PIPEGRAPH_RESULTS"] = str(results)
    import records

    claim = "every test marked cuda passes, and the GPU benchmarks run"
    configuration = {"device": gpu or "none: a rehearsal on the CPU", "slow": slow, "wheels": wanted}
    rows = {
        "passed": passed,
        "tests": {**tests, "ran": ran, "left_out": skipped},
        "commands": [asdict(each) for each in outcomes],
    }
    print("recorded in", records.record("gpu_check", claim, configuration, rows))
    print(json.dumps({"passed": passed, "device": gpu.get("name", "none"), "tests": rows["tests"]}))
    return PASSED if passed else FAILED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, help="download the wheels into this folder, and do nothing else")
    parser.add_argument(
        "--python", default="3.12", help="with --pack: the other machine's Python (default 3.12)"
    )
    parser.add_argument("--platform", action="append", help=f"with --pack (default {', '.join(PLATFORMS)})")
    parser.add_argument("--wheels", type=Path, help="folder that --pack has filled")
    day = datetime.now(UTC).date().isoformat()
    parser.add_argument(
        "--results", type=Path, default=ROOT / "out" / f"gpu-{day}", help="folder to write to"
    )
    parser.add_argument("--slow", action="store_true", help="also the tests marked slow (10,000 steps)")
    parser.add_argument("--allow-cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument(
        "--only",
        default="",
        help="a part of a command's name: tests, host_to_device, replica_parts, gpu_training",
    )
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for each command (default 540)")
    options = parser.parse_args()
    if options.pack is not None:
        pack(options.pack, options.python, options.platform or PLATFORMS)
        return
    status = check(
        options.results.resolve(),
        options.wheels,
        options.allow_cpu,
        options.slow,
        options.limit,
        options.only,
    )
    raise SystemExit(status)


if __name__ == "__main__":
    main()
