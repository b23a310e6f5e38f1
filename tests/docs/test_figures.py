"""The README's figures are those of the newest records: contestants, best peer and losses are computed from them."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README_PATH = ROOT / "README.md"
README = README_PATH.read_text()


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    known = set(sys.modules)
    import figures

    yield figures
    for name in set(sys.modules) - known:
        if (ROOT / "benchmarks" / f"{name}.py").exists():
            del sys.modules[name]


def test_every_figure_is_that_of_its_newest_record(figures):
    for document in figures.DOCUMENTS:
        text = document.read_text()
        assert figures.MARKED.search(text) and figures.rewritten(document, text) == text, document.name


def test_every_page_with_computed_figures_is_looked_at(figures):
    marked = {
        path
        for path in (README_PATH, *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md"))
        if "<!-- figures: " in path.read_text()
    }
    assert marked == set(figures.DOCUMENTS)


def test_no_table_with_units_of_time_stands_outside_the_computed_ones(figures):
    """A typed figure would not be compared."""
    rest = figures.MARKED.sub("", README)
    assert not [line for line in rest.splitlines() if line.startswith("|") and "benchmarks/results" in line]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(r"\*\*([\d.]+) us\*\*", r"**1\1 us**"), (r"us \(torchdata.nodes, tuned\)", "us (Grain)")],
    ids=["a figure", "a contestant who is not the best"],
)
def test_a_false_figure_is_noticed(figures, right, wrong):
    false, changed = re.subn(right, wrong, README, count=1)
    assert changed and figures.rewritten(README_PATH, false) == README


def test_a_loss_is_listed_once_a_record_has_one(figures, tmp_path, monkeypatch):
    entry = {"rate": {"median": 1.0}, "cpu_s_per_unit": {"median": 1.0}}
    faster = {"rate": {"median": 1.5}, "cpu_s_per_unit": {"median": 0.9}}
    row = {
        "configuration": {"rounds": 1},
        "results": {"contestants": {"pipegraph": entry, "Grain": faster, "hand-written loop": faster}},
    }
    (tmp_path / "2026-01-01-other.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(figures.harness, "RESULTS", tmp_path)
    assert figures.losses().splitlines()[2:] == [
        "| other | 0.67 | throughput | Grain |",
        "| other | 0.90 | throughput per CPU second | Grain |",
    ]


def test_training_on_replicas_is_compared_with_ddp(figures, tmp_path, monkeypatch):
    """Its contestants are executors, whose names do not begin with ours."""
    entry = {"rate": {"median": 1.0}, "cpu_s_per_unit": {"median": 1.0}}
    contestants = {
        "executor, 1 slot of 1 thread": {**entry, "rate": {"median": 3.0}},
        "executor, 2 slots of 1 thread": entry,
        "DDP, 2 gloo processes": {**entry, "rate": {"median": 2.0}},
    }
    row = {"configuration": {"rounds": 1}, "results": {"contestants": contestants}}
    (tmp_path / "2026-01-01-replica_training.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(figures.harness, "RESULTS", tmp_path)
    (found,) = figures.losses().splitlines()[2:]
    assert found.endswith("| 0.50 | throughput | DDP, 2 gloo processes |")


@pytest.fixture
def sections(figures):
    """Each comparison on the newest page of benchmarks, with the same as its record gives it."""
    import report

    folder = figures.harness.RESULTS
    printed = max(folder.glob("????-??-??.md")).read_text()
    found = []
    for text in printed.split("\n\n## ")[1:]:
        name, when = re.findall(r"^`(\S+\.jsonl)`, ([^;]*);", text, re.M)[0]
        rows = map(json.loads, (folder / name).read_text().splitlines())
        of_then = [report.section(folder / name, row) for row in rows if report.when(row) == when]
        found.append((name, f"## {text.strip()}", of_then))
    return found


def test_the_page_of_benchmarks_says_what_its_records_say(sections):
    """Later records may wait until the page is written again."""
    assert len(sections) > 10
    assert not [name for name, printed, of_then in sections if printed not in of_then]


def test_a_false_figure_on_the_page_of_benchmarks_is_noticed(sections):
    _, printed, of_then = sections[0]
    figure = re.findall(r"\d[\d.,]+ \(\d", printed)[0]
    assert printed.replace(figure, f"9{figure}", 1) not in of_then
