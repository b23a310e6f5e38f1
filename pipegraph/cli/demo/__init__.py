"""``pipegraph demo``: the whole of pipegraph on one small job."""

from __future__ import annotations

from pipegraph.cli.demo.job import run_demo as run_demo
from pipegraph.cli.demo.shapes import make_files as make_files
