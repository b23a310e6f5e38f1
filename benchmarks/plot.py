"""Draw what was recorded: one picture per script, with the spread over the rounds: rates as ratios to the
yardstick, and where there are none peak memory or the time to the first batch.

Reads the newest row of every ``benchmarks/results/DATE-SCRIPT.jsonl`` (or the files given) and writes
``DATE-SCRIPT.svg`` beside it.

    python benchmarks/plot.py
    python benchmarks/plot.py benchmarks/results/2026-11-20-image_decode.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from records import RESULTS


def races(results: dict[str, Any], title: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The comparisons in one record, also those nested by a parameter: (title, contestants)."""
    for key, value in results.items():
        if not isinstance(value, dict):
            continue
        if key == "contestants":
            yield title, value
        else:
            yield from races(value, f"{title}, {key}")


MEASURES = {
    "rss_mb": "peak RSS of all processes, MB",
    "first_batch_s": "from building the loader to its first batch, s",
}


def bars(contestants: dict[str, Any]) -> tuple[str, list[tuple[str, float, float, float]]]:
    """The axis's label and (name, median, low, high) of every contestant, best last."""
    yardstick = next((next(iter(entry["over"])) for entry in contestants.values() if entry.get("over")), "")
    if yardstick:
        label = f"rate over that of: {yardstick}"
        spreads = {name: entry.get("over", {}).get(yardstick) for name, entry in contestants.items()}
    else:
        measure = next((key for key in MEASURES if any(key in e for e in contestants.values())), "")
        label = MEASURES.get(measure, "")
        spreads = {name: entry.get(measure) for name, entry in contestants.items()}
    found = [(name, s["median"], s["low"], s["high"]) for name, s in spreads.items() if s]
    return label, sorted(found, key=lambda bar: bar[1] if yardstick else -bar[1])


def draw(path: Path) -> Path | None:
    """The picture of a file's newest row; None where it compares nothing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    row = json.loads(path.read_text().splitlines()[-1])
    found = [(title, *bars(entries)) for title, entries in races(row["results"], row["script"])]
    found = [entry for entry in found if entry[2]]
    if not found:
        return None
    heights = [0.3 * len(values) + 0.9 for _, _, values in found]
    figure, axes = plt.subplots(
        len(found), 1, figsize=(8, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (title, label, values) in zip(axes[:, 0], found, strict=True):
        names = [name for name, *_ in values]
        medians = [median for _, median, _, _ in values]
        errors = [[m - low for _, m, low, _ in values], [high - m for _, m, _, high in values]]
        colours = ["#1f6f8b" if name.startswith(("pipegraph", "pg.")) else "#b8c4c8" for name in names]
        axis.barh(names, medians, xerr=errors, color=colours, ecolor="#444444", capsize=2)
        if label.startswith("rate over"):
            axis.axvline(1, color="#444444", linewidth=0.8)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(f"{label} (median, least to greatest of the rounds)", fontsize=8)
        axis.tick_params(labelsize=8)
        if min(medians) > 0 and max(medians) / min(medians) > 20:
            axis.set_xscale("log")
    picture = path.with_suffix(".svg")
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="records to draw (default: all in benchmarks/results/)"
    )
    options = parser.parse_args()
    for path in options.files or sorted(RESULTS.glob("*.jsonl")):
        picture = draw(path)
        print(f"{path.name}: {picture.name if picture else 'nothing to draw'}")


if __name__ == "__main__":
    main()
