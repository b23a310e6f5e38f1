"""tests/docs/claims.md: every quotation stands in its page, and what checks it is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "tests" / "docs" / "claims.md").read_text()
SECTIONS = re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)


def rows(section):
    found = re.findall(r"^\| (.*?) \| (.*) \|$", section, re.M)
    return [row for row in found if row[0] not in ("the page says", "---")]


def plain(text):
    """Without what Markdown adds, in one line."""
    return " ".join(re.sub(r"[*`]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)).split())


@pytest.mark.parametrize(("page", "section"), SECTIONS, ids=[page for page, _ in SECTIONS])
def test_what_is_quoted_is_said(page, section):
    text = plain((ROOT / page).read_text())
    missing = [claim for claim, _ in rows(section) if plain(claim) not in text]
    assert not missing, (
        f"{page} says it otherwise now: change the quotation, and look whether its check still fits"
    )


@pytest.mark.parametrize(("page", "section"), SECTIONS, ids=[page for page, _ in SECTIONS])
def test_what_checks_it_is_there(page, section):
    for claim, checks in rows(section):
        for check in checks.split("; "):
            kind, _, what = check.partition(": ")
            if kind.startswith("`"):
                source = (ROOT / "tests" / kind.strip("`")).read_text()
                name = f"test_{what.replace(' ', '_')}"
                assert re.search(rf"^def {name}\(", source, re.M), f"{claim!r}: {kind} has no {name}"
            elif kind == "record":
                assert list((ROOT / "benchmarks" / "results").glob(f"????-??-??-{what}.jsonl")), what
            else:
                assert kind in ("hand", "open") and what, f"{claim!r}: {check!r}"


def test_there_are_as_many_as_a_reader_expects():
    """Eighty at least, those that nobody has checked among them."""
    assert sum(len(rows(section)) for _, section in SECTIONS) >= 80
    assert "open: " in TEXT
