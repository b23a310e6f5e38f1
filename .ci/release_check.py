"""Builds the release and runs it, without the checkout, on every Python of this machine that it is for.

sdist and wheel are built into dist/ and checked by twine. Then, for each CPython from 3.11 and for the oldest and the
newest versions that pyproject.toml admits, the wheel is installed into an environment of its own: first without
extras, then with all of them (without the GIL: with those that have wheels). The first example of README.md,
``pipegraph demo``, ``pipegraph doctor`` and a part of the tests run there, in a folder without the project. The last
lines are a table of what ran.

    python .ci/release_check.py                        # everything (make release-check)
    python .ci/release_check.py --python 3.12 --bound oldest

PyTorch comes from the index that uv is set up for; UV_TORCH_BACKEND=cpu takes the builds without CUDA.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.13t", "3.14t")
PLACES = (
    "~/.pyenv/versions/*/bin/python3",
    "~/.local/share/uv/python/*/bin/python3",
    "/opt/python/*/bin/python3",
)
BOUNDS = {"oldest": "lowest-direct", "newest": "highest"}
"""What uv calls the two ends of the admitted versions."""

EXTRAS = ("images", "cloud", "shards", "cli", "report", "metrics")
WITHOUT_GIL = ("cloud", "cli", "report", "metrics")
"""Extras with wheels for free-threaded CPython: OpenCV, simplejpeg, zstandard and google-crc32c have none."""

BESIDE = ("Pillow>=10.3", "pyarrow>=15")
"""Of the others' packages, those that have."""

NOT_WITHOUT_GIL = ("first example", "demo")
"""OpenCV draws their images, and google-crc32c checks their shards."""

SHOWN = ("torch", "numpy", "pyarrow", "obstore", "opencv-python-headless", "Pillow")
TESTS = (
    "tests/engine/test_crew.py",
    "tests/engine/test_resume.py",
    "tests/engine/test_failures.py",
    "tests/images/test_backends.py",
    "tests/loader/test_dataloader_beside_torch.py",
    "tests/operators/test_tables.py",
    "tests/operators/test_collate.py",
    "tests/process/test_workers.py",
    "tests/profile/test_openmetrics.py",
    "tests/profile/test_report.py",
    "tests/storage/test_formats.py",
    "tests/storage/test_parquet.py",
    "tests/storage/test_stores.py",
    "tests/storage/test_writing.py",
)
"""What meets Python and the libraries most; `make test` runs all of them on one version."""

TESTS_WITHOUT_GIL = (
    "tests/engine",
    "tests/operators/test_tables.py",
    "tests/process/test_workers.py",
    "tests/profile/test_report.py",
)
"""All of the engine's, which is what relies on it, and what needs no package that has no wheel."""

PLAIN = """
import pipegraph as pg
from pipegraph import operators as ops
graph = pg.Graph(seed=1)
rows = graph.add(ops.FromSequence(range(100), shuffle=True))
rows.then(ops.Map(lambda x: x * 2), workers=2).then(ops.Batch(10))
with graph.loader() as loader:
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
with graph.loader() as loader:
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest
"""


@dataclass
class Row:
    """What ran on one Python with one end of the versions."""

    python: str
    bound: str
    versions: list[str] = field(default_factory=list)
    ran: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(result.startswith("FAILED") for result in self.ran.values())


STEPS = ("install", "no extras", "doctor", "first example", "demo", "tests")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", choices=VERSIONS, help="only these; may be repeated")
    parser.add_argument("--bound", action="append", choices=BOUNDS, help="only this end of the versions")
    parser.add_argument("--tests", nargs="+", help="files of tests, instead of the usual ones")
    parser.add_argument("--work", type=Path, help="folder for the environments, instead of a temporary one")
    options = parser.parse_args()
    wheel = build()
    found = dict(pythons())
    rows = []
    with tempfile.TemporaryDirectory(prefix="release-", dir=options.work) as work:
        for version in options.python or VERSIONS:
            for bound in options.bound or BOUNDS:
                if version in found:
                    tests = options.tests or (TESTS_WITHOUT_GIL if version.endswith("t") else TESTS)
                    row = check(version, found[version], bound, wheel, Path(work).resolve(), tests)
                    print(table([row]), flush=True)
                    rows.append(row)
    print("\n" + table(rows))
    for version in options.python or VERSIONS:
        if version not in found:
            print(f"CPython {version}: not on this machine, so nothing ran on it")
    return int(not rows or any(row.failed for row in rows))


def build() -> Path:
    """sdist, and the wheel made from it, in dist/; their descriptions checked."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run([sys.executable, "-m", "build", "--quiet", str(ROOT)], ROOT)
    made = sorted(str(path) for path in (ROOT / "dist").iterdir())
    print(run([sys.executable, "-m", "twine", "check", "--strict", *made], ROOT).strip(), flush=True)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    return wheel


def pythons() -> Iterator[tuple[str, str]]:
    """(version, program) of each CPython here; ``t`` stands for a build without the GIL."""
    ask = (
        "import sys, sysconfig, venv; "
        "print('%d.%d' % sys.version_info[:2] + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
    )
    candidates = [shutil.which(f"python{version}") for version in VERSIONS]
    for pattern in PLACES:
        candidates += sorted(glob.glob(os.path.expanduser(pattern)), reverse=True)
    known = set()
    for program in filter(None, candidates):
        done = subprocess.run([program, "-c", ask], capture_output=True, text=True)
        version = done.stdout.strip()
        if done.returncode == 0 and version in VERSIONS and version not in known:
            known.add(version)
            yield version, program


def check(version: str, program: str, bound: str, wheel: Path, work: Path, tests: Sequence[str]) -> Row:
    """Installs the wheel and runs each step; a step that fails does not keep the next from running."""
    row = Row(version, bound)
    place = work / f"{version}-{bound}"
    place.mkdir()
    python = str(place / "env" / "bin" / "python")
    command = str(place / "env" / "bin" / "pipegraph")
    print(f"\n== CPython {version} with the {bound} versions", flush=True)
    uv = [str(Path(sys.executable).parent / "uv"), "--quiet"]
    install = [
        *uv,
        "pip",
        "install",
        "--python",
        python,
        "--constraint",
        "versions.txt",
        "--only-binary",
        ":all:",
    ]
    chosen, beside = (WITHOUT_GIL, BESIDE) if version.endswith("t") else (EXTRAS, ())
    extras = [argument for extra in chosen for argument in ("--extra", extra)]
    (place / "beside.in").write_text("\n".join(beside))
    steps = {
        "install": [
            [*uv, "venv", "--python", program, "env"],
            [*uv, "pip", "compile", "--python", python, "--resolution", BOUNDS[bound], "--only-binary", ":all:",
             *extras, str(ROOT / "pyproject.toml"), "beside.in", "--output-file", "versions.txt"],
            [*install, str(wheel)],
        ],
        "no extras": [[python, "-c", PLAIN]],
        "doctor": [
            [*install, f"{wheel}[{','.join(chosen)}]", *beside],
            [command, "doctor"],
        ],
        "first example": [[command, "demo", "--make", "."], [python, "first.py"]],
        "demo": [[command, "demo"]],
        "tests": [
            [*install, "pytest>=9", "hypothesis>=6.100", "moto[s3,server]>=5"],
            [python, "-m", "pytest", "-q", "-m", "not slow and not cuda and not browser", *tests],
        ],
    }  # fmt: skip
    assert tuple(steps) == STEPS
    lay_out(place)
    for name, commands in steps.items():
        if version.endswith("t") and name in NOT_WITHOUT_GIL:
            continue
        row.ran[name] = step(name, commands, place)
        if name == "install" and row.failed:
            break
        if name == "doctor":
            row.versions = versions(uv, python)
    shutil.rmtree(place)
    return row


def lay_out(place: Path) -> None:
    """The tests with pytest's settings and the example, without the package."""
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"^```python\n(.*?)^```$", readme, re.M | re.S)
    assert found, "README.md has no Python block"
    (place / "first.py").write_text(found[1])


def step(name: str, commands: list[list[str]], place: Path) -> str:
    """ "ok" with what pytest counted or the seconds, or FAILED with the end of what was printed."""
    began = time.monotonic()
    printed = ""
    for command in commands:
        with open(place / f"{name}.log", "w+") as log:
            done = subprocess.run(
                command, cwd=place, env=surroundings(place), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            log.seek(0)
            printed = log.read()
        if done.returncode:
            print(f"{name} failed: {' '.join(command)[:200]}\n{printed[-3000:]}", flush=True)
            break
    seconds = f"{time.monotonic() - began:.0f} s"
    counted = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", printed) if name == "tests" else []
    said = ", ".join([*counted, seconds])
    return f"FAILED ({said})" if done.returncode else said


def surroundings(place: Path) -> dict[str, str]:
    """The environment without what would let the checkout in."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # Without the GIL, pytest.warns would not see the warnings of other threads.
    return {**outside, "PIPEGRAPH_CACHE": str(place / "cache"), "PYTHON_CONTEXT_AWARE_WARNINGS": "0"}


def versions(uv: list[str], python: str) -> list[str]:
    listed = run([*uv, "pip", "freeze", "--python", python], ROOT)
    pinned = dict(line.lower().split("==") for line in listed.splitlines() if "==" in line)
    return [f"{name} {pinned.get(name.lower(), '-')}" for name in SHOWN]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def table(rows: list[Row]) -> str:
    lines = ["| CPython | versions | " + " | ".join(STEPS) + " |", "| --- " * (2 + len(STEPS)) + "|"]
    for row in rows:
        results = [row.ran.get(name, "not run") for name in STEPS]
        lines.append(
            f"| {row.python} | {row.bound}: {', '.join(row.versions)} | " + " | ".join(results) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
