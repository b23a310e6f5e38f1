"""Comparisons as Markdown tables, from what a record holds of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

TITLES = {
    "rate": "per second",
    "cpu_s_per_unit": "CPU of each",
    "import_s": "import",
    "first_batch_s": "first batch",
    "both_s": "both",
    "cpu_s": "CPU of both",
    "rss_mb": "peak RSS, MB",
    "pss_mb": "peak PSS, MB",
    "before_mb": "before, MB",
    "added_mb": "added, MB",
    "rss_mb_over_dataloader": "RSS / DataLoader's",
}
"""Measures of a record, as a reader knows them; the others are ratios that older records have besides."""

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}

NO_PEERS = ("pipegraph", "pg.", "hand-written", "bare", "plain", "limit", "raw", "resident")
"""How the names of contestants begin that are ours, or show what is possible at all."""


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads well in a terminal too."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    out = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    out.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(out)


def races(results: dict[str, Any], title: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The comparisons in one record, also those nested by a parameter: (title, contestants)."""
    for key, value in results.items():
        if not isinstance(value, dict):
            continue
        if key == "contestants":
            yield title, value
        else:
            yield from races(value, f"{title}, {key}")


def cell(entry: Any, factor: float = 1.0) -> str:
    """A spread as text: median (least-greatest)."""
    if not isinstance(entry, dict) or "median" not in entry:
        return "-"
    median, low, high = (number(entry[key] * factor) for key in ("median", "low", "high"))
    return median if median == low == high else f"{median} ({low}-{high})"


def number(value: float) -> str:
    """Three digits, and no exponents for what can be read without."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def inverse(entry: Any) -> Any:
    """The ratio the other way round."""
    if not isinstance(entry, dict) or not entry.get("low"):
        return None
    return {"median": 1 / entry["median"], "low": 1 / entry["high"], "high": 1 / entry["low"]}


def ours(contestants: dict[str, Any]) -> str | None:
    """The yardstick that is the project's own, if there is one."""
    yardsticks = dict.fromkeys(name for entry in contestants.values() for name in entry.get("over", {}))
    return next((name for name in yardsticks if name.startswith("pipegraph")), None)


def peers(entries: dict[str, Any]) -> list[str]:
    """The other loaders: hand-written loops are none, nor is one that runs the ideal's own function."""
    return [name for name in entries if not name.startswith(NO_PEERS) and "ideal" not in name]


def comparison(contestants: dict[str, Any]) -> str:
    """One table: a row per contestant, a column per measured spread, ratios last.

    Ratios to the project's own row are shown the other way round: how many times the peer it is.
    """
    present = {
        key for entry in contestants.values() for key, value in entry.items() if "median" in (value or {})
    }
    columns = [key for key in TITLES if key in present]
    columns += sorted(present - set(TITLES) - {key for key in present if "_over_" in key})
    first = "rate" if "rate" in columns else columns[0]
    sign = -1 if first == "rate" else 1
    ordered = sorted(contestants.items(), key=lambda item: sign * item[1][first]["median"])
    yardsticks = dict.fromkeys(name for entry in contestants.values() for name in entry.get("over", {}))
    mine = ours(contestants)
    scales = {key: scale([e[key] for e in contestants.values() if key in e], key) for key in columns}
    headers = [
        "",
        *(TITLES.get(key, key) + (f", {unit}" if unit else "") for key, (unit, _) in scales.items()),
    ]
    for name in yardsticks:
        headers += [f"{name} x this", "in CPU"] if name == mine else [f"x {name}"]
    rows = []
    for name, entry in ordered:
        row = [name, *(cell(entry.get(key), factor) for key, (_, factor) in scales.items())]
        for other in yardsticks:
            ratio = entry.get("over", {}).get(other)
            row.append(cell(inverse(ratio) if other == mine else ratio))
            if other == mine:
                row.append(cell(inverse(entry.get("cpu_over", {}).get(other))))
        rows.append(row)
    return table(headers, rows)


def scale(entries: list[Any], measure: str) -> tuple[str, float]:
    """(unit, factor) of a column: one unit, in which its least median is one at least; none for what is no time."""
    if not measure.endswith("_s") and measure != "cpu_s_per_unit":
        return "", 1.0
    least = min(entry["median"] for entry in entries)
    return next(((unit, factor) for unit, factor in UNITS.items() if least * factor >= 1), ("us", 1e6))
