"""The README's figures are those of the records it names: every number is looked up there."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TABLE = re.compile(
    r"^\| \[[^]]*\]\((?P<record>benchmarks/results/[^)]+)\)(?: at (?P<part>\d+) stages)? \| (?P<unit>ms|us) of CPU[^|]* \|\n"
    r"\| --- \| ---: \|\n(?P<rows>(?:\|[^\n]*\|\n)+)",
    re.M,
)
FACTORS = {"ms": 1e3, "us": 1e6}
TABLES = [found.groupdict() for found in TABLE.finditer(README)]


def measured(record, part):
    """CPU seconds per unit by contestant, of every run in the record."""
    for line in (ROOT / record).read_text().splitlines():
        results = json.loads(line)["results"]
        results = results.get(part, {}) if part else results
        yield {
            name: entry["cpu_s_per_unit"]["median"] for name, entry in results.get("contestants", {}).items()
        }


def test_there_are_figures():
    assert TABLES


@pytest.mark.parametrize("table", TABLES, ids=lambda table: Path(table["record"]).stem)
def test_every_figure_is_in_the_record_that_is_named(table):
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table["rows"].splitlines()]
    shown = {name: float(value) for name, value in rows}
    factor = FACTORS[table["unit"]]
    for run in measured(table["record"], table["part"]):
        if shown == {name: float(f"{run[name] * factor:.3g}") for name in shown if name in run}:
            # Nobody is left out who was faster.
            slowest = max(shown.values())
            assert {name for name, cost in run.items() if cost * factor < slowest * 0.999} <= set(shown)
            return
    pytest.fail(f"no run in {table['record']} has the README's figures {shown}")


FIRST_TABLE = {
    "2026-11-21-image_recipe.jsonl": (
        (),
        "cpu_s_per_unit",
        1e3,
        ("pipegraph, auto", "Grain", "DataLoader, OpenCV"),
    ),
    "2026-11-20-image_recipe_large.jsonl": (
        (),
        "cpu_s_per_unit",
        1e3,
        ("pipegraph, auto", "DALI", "DataLoader, OpenCV"),
    ),
    "2026-11-21-resume.jsonl": (
        (),
        "cpu_s_per_unit",
        1e3,
        ("pipegraph, threads", "Grain", "DataLoader, batches drawn again"),
    ),
    "2026-11-20-memory_peak.jsonl": (
        ("4 workers",),
        "rss_mb",
        1,
        ("pipegraph: batch, DecodeImage", "torchdata.nodes, threads", "DataLoader, processes"),
    ),
    "2026-11-21-small_rows.jsonl": (
        (),
        "cpu_s_per_unit",
        1e6,
        ("pipegraph, rows", "torchdata.nodes, rows", "DataLoader, rows, no worker"),
    ),
}
"""Record -> part, quantity, factor and the contestants of the three columns on the first screen."""


@pytest.mark.parametrize("record", FIRST_TABLE)
def test_the_figures_on_the_first_screen_are_those_of_a_recorded_run(record):
    part, quantity, factor, names = FIRST_TABLE[record]
    (row,) = [line for line in README.splitlines() if line.startswith("|") and f"results/{record}" in line]
    shown = [
        float(re.search(r"[\d,.]+", cell)[0].replace(",", "")) for cell in row.strip("| ").split("|")[1:]
    ]
    for line in (ROOT / "benchmarks/results" / record).read_text().splitlines():
        results = json.loads(line)["results"]
        for key in part:
            results = results.get(key, {})
        found = results.get("contestants", {})
        if all(name in found and quantity in found[name] for name in names):
            measured_here = [found[name][quantity]["median"] * factor for name in names]
            if all(abs(a - b) <= 0.005 * b for a, b in zip(shown, measured_here, strict=True)):
                return
    pytest.fail(f"no run in {record} has the figures {shown}")
