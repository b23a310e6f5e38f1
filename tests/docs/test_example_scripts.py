"""Every script of examples/ runs with --smoke, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def ffmpeg_is_here():
    try:
        import torchcodec  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_example_runs(script, tmp_path):
    if script.stem == "audio" and not ffmpeg_is_here():
        pytest.skip("torchcodec finds no FFmpeg libraries here: apt-get install ffmpeg")
    environment = {**os.environ, "PIPEGRAPH_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", script, "--smoke"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples():
    assert len(SCRIPTS) >= 5
