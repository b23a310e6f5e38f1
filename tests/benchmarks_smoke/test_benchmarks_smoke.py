"""The benchmarks' own parts: what is timed, how failures show, how ratios are made; scripts start."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PEERS = (
    "hop_cost.py",
    "image_decode.py",
    "image_recipe.py",
    "memory_peak.py",
    "python_transform.py",
)
PEERS += (
    "planted.py",
    "report.py",
    "resume.py",
    "run_all.py",
    "small_rows.py",
    "start_up.py",
    "tokens.py",
)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("harness")


@pytest.fixture
def hop_cost(harness: Any) -> Any:
    return importlib.import_module("hop_cost")


def finite(items: int, opened: list[str] | None = None) -> Any:
    @contextmanager
    def stream() -> Iterator[Any]:
        yield iter(range(items))
        if opened is not None:
            opened.append("closed")

    return stream


def test_a_run_counts_only_the_timed_items_and_closes_the_stream(harness: Any) -> None:
    closed: list[str] = []
    run = harness.Contestant("ten", finite(100, closed), warm=5, timed=10, weight=64).measure()
    assert run.units == 640
    assert run.wall_s > 0
    assert closed == ["closed"]


def test_a_record_is_one_json_row_with_machine_and_versions(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("records"), "RESULTS", tmp_path)
    path = harness.record("smoke", "a claim", {"rounds": 1}, {"answer": 42})
    harness.record("smoke", "a claim", {"rounds": 1}, {"answer": 43})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["results"]["answer"] for row in rows] == [42, 43]
    assert rows[0]["machine"]["versions"]["torch"]


@pytest.mark.parametrize("way", ["bare", "plain_queues"])
def test_the_hand_written_chains_keep_every_item_in_order(hop_cost: Any, way: str) -> None:
    with getattr(hop_cost, way)(3) as stream:
        assert list(islice(stream, 500)) == list(range(500))


@pytest.mark.parametrize("script", PEERS)
def test_the_scripts_against_peers_start_without_any_peer(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setattr(os, "environ", {**os.environ})
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out
