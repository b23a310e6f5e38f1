"""``make schedules``: what it prints, and the record that it keeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_says_what_was_explored_and_keeps_it(tmp_path):
    run = subprocess.run(
        [sys.executable, "tests/schedules/run.py", "--model", "ChannelModel", "--total", "60", "--jobs", "1", "--record"],
        cwd=ROOT, env={**os.environ, "PIPEGRAPH_RESULTS": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (path,) = tmp_path.glob("????-??-??-schedules.jsonl")
    found = json.loads(path.read_text())["results"]["models"]
    assert found["ChannelModel"]["schedules"] == found["all"]["schedules"] == 60
    assert found["ChannelModel"]["distinct"] > 50
    assert found["ChannelModel"]["switch_points"] > 60 * 50
    assert 5 < found["ChannelModel"]["lines"] < 50
    assert run.stdout.splitlines()[1].split()[:3] == [
        "ChannelModel",
        "60",
        str(found["ChannelModel"]["distinct"]),
    ]
