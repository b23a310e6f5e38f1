"""The newest record of every comparison as one Markdown page: rates and ratios, claims, machine, versions.

Reads the newest row of the newest ``benchmarks/results/DATE-SCRIPT.jsonl`` of every script and writes ``DATE.md``
beside them. A table at its start has a line for every script of the set, also those never recorded, and says which
goals were met.

    python benchmarks/report.py
    python benchmarks/report.py --date 2026-11-20
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import catalogue
from records import RESULTS
from tables import TITLES, comparison, number, ours, peers, races, table

LEGEND = (
    "Each cell is the median over alternated rounds, with the range in parentheses; ratios are taken within a round. "
    "`x this` says how many times as fast pipegraph is as the contestant of the row, `in CPU` how many times as much "
    "it does with a second of CPU. Each goal is a minimum ratio of pipegraph to the named contestant (throughput "
    "unless stated otherwise); with several contestants, the fastest counts. It is met if the median ratio reaches it."
)


def times(entries: dict[str, Any], goal: catalogue.Goal) -> float | None:
    """How many times as good ours is as the best of a goal's others; None where one was not measured."""
    mine = goal.ours or ours(entries)
    found = []
    for name in goal.others or peers(entries):
        entry = entries.get(name, {})
        if goal.measure != "rate" and mine in entries and goal.measure in entry:
            found.append(entry[goal.measure]["median"] / entries[mine][goal.measure]["median"])
        elif goal.measure == "rate" and mine in entry.get("over", {}):
            found.append(1 / entry["over"][mine]["median"])
        elif goal.measure == "rate" and name in entries.get(mine or "", {}).get("over", {}):
            found.append(entries[mine or ""]["over"][name]["median"])
        elif goal.others:
            return None
    return min(found, default=None)


def verdict(results: dict[str, Any], entry: catalogue.Entry) -> str:
    """A script's goals, each met or not; where its record has several parts, the worst of them decides."""
    said = []
    for goal in entry.goals:
        found = [times(entries, goal) for _, entries in races(results, entry.record) if entries]
        other = "the best peer" if not goal.others else goal.others[0]
        other += f" and {len(goal.others) - 1} more" * (len(goal.others) > 1)
        what = f"{number(goal.least)} x {other}" + f" ({TITLES[goal.measure]})" * (goal.measure != "rate")
        worst = None if None in found else min((one for one in found if one), default=None)
        if worst is None:
            said.append(f"{what}: not measured")
        else:
            said.append(f"{what}: {'met' if worst >= goal.least else '**not met**'}, {number(worst)}")
    return "; ".join(said) or "-"


def overview(date: str, folder: Path) -> str:
    """A line for every script of the set, and for whatever else was recorded that day."""
    newest = {path.name[11:-6]: path for path in sorted(folder.glob("*.jsonl"))}
    rows = []
    for entry in catalogue.SET:
        path = newest.pop(entry.record, None)
        if path is None:
            rows.append([question(entry.record), verdict({}, entry), "never recorded"])
            continue
        row = json.loads(path.read_text().splitlines()[-1])
        rows.append([question(entry.record), verdict(row["results"], entry), when(row)])
    for name, path in newest.items():
        if path.name.startswith(date) and section(path):
            row = json.loads(path.read_text().splitlines()[-1])
            rows.append([question(name, row["claim"]), "-", when(row)])
    return table(["what was compared", "goal", "newest record"], rows)


def question(name: str, claim: str = "") -> str:
    """A record's name for people: the set's question, or what its claim is about."""
    found = next((entry.question for entry in catalogue.SET if entry.record == name), claim or name)
    found = found.partition(": >=")[0]
    return found if found.startswith("pg.") else found[:1].upper() + found[1:]


def when(row: dict[str, Any]) -> str:
    """Time and rounds of a record."""
    rounds = row["configuration"].get("rounds")
    said = f", {rounds} round{'s' * (rounds != 1)}" if isinstance(rounds, int) else ""
    return row["time"][:16].replace("T", " ") + said


def reasons(results: dict[str, Any], title: str = "") -> list[str]:
    """Who was not measured, and why, at any depth."""
    lines = []
    for key, value in results.items():
        if key == "missing" and isinstance(value, dict):
            where = f" ({title})" if title else ""
            lines += [f"Not measured{where}: {name}: {why}" for name, why in value.items()]
        elif isinstance(value, dict) and key != "contestants":
            lines += reasons(value, f"{title}, {key}".removeprefix(", "))
    return lines


def section(path: Path, row: dict[str, Any] | None = None) -> str:
    """A row of one file, by default its newest; empty where it compares nothing."""
    row = row or json.loads(path.read_text().splitlines()[-1])
    tables = [
        (title, comparison(entries)) for title, entries in races(row["results"], row["script"]) if entries
    ]
    if not tables:
        return ""
    facts = row["machine"]
    setup = ", ".join(f"{key} {value}" for key, value in row["configuration"].items())
    name = question(row["script"], row["claim"])
    lines = [f"## {name}"]
    for title, text in tables:
        lines += [f"### {title.removeprefix(row['script']).removeprefix(', ')}"] * (len(tables) > 1) + [text]
    lines += reasons(row["results"])
    lines.append(
        f"`{path.name}`, {when(row)}; {facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']}; {setup}. "
        f"Claim: {row['claim']}."
    )
    return "\n\n".join(lines)


def write(date: str, folder: Path = RESULTS) -> Path:
    """The page of a day: the newest record of every comparison until then."""
    known = [path for path in sorted(folder.glob("*.jsonl")) if path.name[:10] <= date]
    paths = sorted({path.name[11:]: path for path in known}.values(), key=lambda path: path.name[11:])
    sections = [text for text in map(section, paths) if text]
    versions: dict[str, str] = {}
    for path in paths:
        versions |= json.loads(path.read_text().splitlines()[-1])["machine"]["versions"]
    page = [
        f"# Benchmarks of {date}",
        LEGEND,
        overview(date, folder),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        *sections,
    ]
    target = folder / f"{date}.md"
    target.write_text("\n\n".join(page) + "\n")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--date", default="", help="YYYY-MM-DD (default: the newest)")
    options = parser.parse_args()
    dates = sorted(path.name[:10] for path in RESULTS.glob("*.jsonl"))
    if not dates:
        raise SystemExit(f"no records in {RESULTS.name}/: run a benchmark first")
    print(write(options.date or dates[-1]).name)


if __name__ == "__main__":
    main()
