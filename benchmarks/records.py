"""One dated JSON row per run: what was measured, where, and with which versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "numpy", "pipegraph-torch", "torchdata", "spdl-core", "spdl-io", "grain", "webdataset",
    "nvidia-dali-cuda130", "nvidia-nvimgcodec-cu13", "opencv-python-headless", "pillow", "simplejpeg",
    "torchvision", "mosaicml-streaming", "litdata",
)  # fmt: skip
RESULTS = Path(os.environ.get("PIPEGRAPH_RESULTS") or Path(__file__).parent / "results")


def versions() -> dict[str, str]:
    """Of the packages that matter, those that this interpreter has."""
    installed = importlib.metadata.distributions()
    there = {each.name.lower().replace("_", "-"): each.version for each in installed if each.name}
    return {package: there[package] for package in PACKAGES if package in there}


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures: processor, cores, memory, interpreter, load, versions."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": versions(),
    }


def record(script: str, claim: str, configuration: Mapping[str, Any], results: Mapping[str, Any]) -> Path:
    """Append one JSON row to today's file of ``script`` in ``benchmarks/results/``."""
    now = datetime.now(UTC)
    row = {
        "script": script,
        "time": now.isoformat(timespec="seconds"),
        "claim": claim,
        "configuration": dict(configuration),
        "machine": machine(),
        "results": dict(results),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now.date().isoformat()}-{script}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return path
