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
SHARED = (
    "harness",
    "ideal",
    "images",
    "peers",
    "recipe",
    "records",
    "tables",
    "catalogue",
    "shuffle_quality",
)
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.stem not in SHARED)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("harness")


@pytest.fixture
def hop_cost(harness: Any) -> Any:
    return importlib.import_module("hop_cost")


def finite(items: int, closed: list[str], drawn: list[int]) -> Any:
    @contextmanager
    def stream() -> Iterator[Any]:
        yield (drawn.append(item) for item in range(items))
        closed.append("closed")

    return stream


def test_a_run_counts_only_the_timed_items_and_closes_the_stream(harness: Any) -> None:
    closed: list[str] = []
    drawn: list[int] = []
    stream = finite(100, closed, drawn)
    run = harness.Contestant("ten", stream, warm=5, timed=10, weight=64).measure()
    assert run["rate"] > 0 and run["cpu_s_per_unit"] > 0
    assert len(drawn) == 15 and closed == ["closed"]


def test_ratios_say_how_many_times_as_good(harness: Any) -> None:
    race = harness.Race({"a": [{"rate": 4.0, "cpu_s": 1.0}], "b": [{"rate": 2.0, "cpu_s": 3.0}]})
    assert race.ratios("a", "b", "rate")["median"] == 2
    assert race.ratios("a", "b", "cpu_s")["median"] == 3


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


@pytest.mark.parametrize("script", SCRIPTS)
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
