"""A day's records as one Markdown page: every comparison with its rates and ratios, claims, machine, versions.

Reads the newest row of every ``benchmarks/results/DATE-SCRIPT.jsonl`` and writes ``DATE.md`` beside them.

    python benchmarks/report.py
    python benchmarks/report.py --date 2026-11-20
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import harness
from plot import races


def cell(entry: Any) -> str:
    """A spread as text: median (least-greatest)."""
    if not isinstance(entry, dict) or "median" not in entry:
        return "-"
    median, low, high = (number(entry[key]) for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def number(value: float) -> str:
    """Four digits, and no exponents for what can be read without."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def comparison(contestants: dict[str, Any]) -> str:
    """One table: a row per contestant, a column per measured spread, ratios last."""
    columns: dict[str, None] = {}
    for entry in contestants.values():
        columns.update(dict.fromkeys(key for key, value in entry.items() if "median" in (value or {})))
    yardsticks = dict.fromkeys(name for entry in contestants.values() for name in entry.get("over", {}))
    first = next(iter(columns))
    upward = first == "rate"
    ordered = sorted(contestants.items(), key=lambda item: item[1][first]["median"] * (-1 if upward else 1))
    rows = [
        [name]
        + [cell(entry.get(column)) for column in columns]
        + [cell(entry.get(kind, {}).get(other)) for other in yardsticks for kind in ("over", "cpu_over")]
        for name, entry in ordered
    ]
    return harness.table(
        ["", *columns, *(f"{kind} x {name}" for name in yardsticks for kind in ("rate", "per CPU s"))], rows
    )


def section(path: Path) -> str:
    """The newest row of one file; empty where it compares nothing."""
    row = json.loads(path.read_text().splitlines()[-1])
    tables = [
        (title, comparison(entries)) for title, entries in races(row["results"], row["script"]) if entries
    ]
    if not tables:
        return ""
    facts = row["machine"]
    setup = ", ".join(f"{key} {value}" for key, value in row["configuration"].items())
    lines = [
        f"## {row['script']}",
        f"Claim: {row['claim']}.",
        f"{row['time']}; {facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']}; {setup}.",
    ]
    for title, text in tables:
        lines += [f"### {title}"] * (len(tables) > 1) + [text]
    missing = row["results"].get("missing") or {}
    lines += [f"Not measured: {name}: {reason}" for name, reason in missing.items()]
    return "\n\n".join(lines)


def newest_date(folder: Path) -> str:
    """The date of the newest record.

    Raises:
        SystemExit: there is none.
    """
    dates = sorted(path.name[:10] for path in folder.glob("*.jsonl"))
    if not dates:
        raise SystemExit(f"no records in {folder.name}/: run a benchmark first")
    return dates[-1]


def write(date: str, folder: Path = harness.RESULTS) -> Path:
    """The page of one day."""
    paths = sorted(folder.glob(f"{date}-*.jsonl"))
    sections = [text for text in map(section, paths) if text]
    versions = json.loads(paths[-1].read_text().splitlines()[-1])["machine"]["versions"]
    page = [
        f"# Benchmarks of {date}",
        "Median (least-greatest) over alternated rounds; ratios are taken within a round.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        *sections,
    ]
    target = folder / f"{date}.md"
    target.write_text("\n\n".join(page) + "\n")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--date", default="", help="YYYY-MM-DD (default: the newest)")
    options = parser.parse_args()
    print(write(options.date or newest_date(harness.RESULTS)).name)


if __name__ == "__main__":
    main()
