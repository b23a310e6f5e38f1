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


@pytest.fixture
def sections(figures):
    """Each comparison on the newest page of benchmarks, with the same as its record gives it."""
    import report

    folder = figures.RESULTS
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
