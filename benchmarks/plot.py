"""Draw the recorded rates: one picture per script, ratio to the yardstick with its spread over the
rounds.

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

RESULTS = Path(__file__).parent / "results"


def races(results: dict[str, Any], title: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The comparisons in one record, also those nested by a parameter: (title, contestants)."""
    for key, value in results.items():
        if not isinstance(value, dict):
            continue
        if key == "contestants":
            yield title, value
        else:
            yield from races(value, f"{title}, {key}")


def bars(contestants: dict[str, Any]) -> tuple[str, list[tuple[str, float, float, float]]]:
    """The first yardstick's name and (name, median, low, high) of every ratio to it, best last."""
    yardstick = next((next(iter(entry["over"])) for entry in contestants.values() if entry.get("over")), "")
    ratios = [
        (
            name,
            entry["over"][yardstick]["median"],
            entry["over"][yardstick]["low"],
            entry["over"][yardstick]["high"],
        )
        for name, entry in contestants.items()
        if yardstick and yardstick in entry.get("over", {})
    ]
    return yardstick, sorted(ratios, key=lambda ratio: ratio[1])


def draw(path: Path) -> Path | None:
    """The picture of a file's newest row; None where it holds no ratios."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    row = json.loads(path.read_text().splitlines()[-1])
    found = [(title, *bars(entries)) for title, entries in races(row["results"], row["script"])]
    found = [entry for entry in found if entry[2]]
    if not found:
        return None
    heights = [0.3 * len(ratios) + 0.9 for _, _, ratios in found]
    figure, axes = plt.subplots(
        len(found), 1, figsize=(8, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (title, yardstick, ratios) in zip(axes[:, 0], found, strict=True):
        names = [name for name, *_ in ratios]
        medians = [median for _, median, _, _ in ratios]
        errors = [[m - low for _, m, low, _ in ratios], [high - m for _, m, _, high in ratios]]
        colours = ["#1f6f8b" if name.startswith("pipegraph") else "#b8c4c8" for name in names]
        axis.barh(names, medians, xerr=errors, color=colours, ecolor="#444444", capsize=2)
        axis.axvline(1, color="#444444", linewidth=0.8)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(
            f"rate over that of: {yardstick} (median, least to greatest of the rounds)", fontsize=8
        )
        axis.tick_params(labelsize=8)
        if medians[0] > 0 and medians[-1] / medians[0] > 20:
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
