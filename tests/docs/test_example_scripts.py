"""Every script of examples/ runs with --smoke, as the main program."""

import runpy
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
def test_the_example_runs(script, tmp_path, monkeypatch, capsys):
    if script.stem == "audio" and not ffmpeg_is_here():
        pytest.skip("torchcodec finds no FFmpeg libraries here: apt-get install ffmpeg")
    monkeypatch.setenv("PIPEGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--smoke"])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


def test_there_are_examples():
    assert len(SCRIPTS) >= 5
