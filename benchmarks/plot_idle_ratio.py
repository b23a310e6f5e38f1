"""Draw the newest record of ``idle_ratio.py``: idle share by trainers, and by T_load / T_train.

Writes ``DATE-idle_ratio.svg`` beside the record.

    python benchmarks/plot_idle_ratio.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#8d6a9f", "#3d405b")


def by_trainers(axis: Any, rows: list[dict[str, Any]]) -> None:
    """With a barrier per step: one colour per rate; theory dotted, simulated solid, preloading dashed."""
    rows = [row for row in rows if row["barrier"]]
    for colour, rate in zip(COLOURS, sorted({row["rate_mb_s"] for row in rows}), strict=True):
        chosen = [row for row in rows if row["rate_mb_s"] == rate]
        trainers = [row["trainers"] for row in chosen]
        for name, style in (("theory", ":"), ("without", "-o"), ("with", "--s")):
            axis.plot(
                trainers,
                [100 * row[name] for row in chosen],
                style,
                color=colour,
                markersize=4,
                label=f"{rate:g} MB/s" if name == "without" else None,
            )
    axis.set_xscale("log", base=2)
    axis.set_xlabel("trainers, a barrier in every step")
    axis.set_ylabel("idle, % of all trainers' time")
    axis.set_title(
        "parts of 16 GB, trained on for 6 h each\ndotted: theory, circles: without, squares: with preloading",
        fontsize=9,
    )
    axis.legend(fontsize=8, title="per trainer", title_fontsize=8)


def by_ratio(axis: Any, rows: list[dict[str, Any]]) -> None:
    """16 trainers: preloading as loads take longer, one colour per jitter, with and without a barrier."""
    for colour, jitter in zip(COLOURS, sorted({row["jitter"] for row in rows}), strict=False):
        for barrier, style in ((False, "--"), (True, "-o")):
            chosen = [row for row in rows if row["jitter"] == jitter and row["barrier"] == barrier]
            axis.plot(
                [row["load_over_train"] for row in chosen],
                [max(100 * row["with"], 1e-3) for row in chosen],
                style,
                color=colour,
                markersize=4,
                label=f"sigma {jitter:g}, " + ("barrier" if barrier else "no barrier"),
            )
    axis.axhline(1, color="#444444", linewidth=0.8)
    axis.axvline(0.9, color="#444444", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_xlabel("T_load / T_train")
    axis.set_ylabel("idle, % (drawn at 0.001 % where less)")
    axis.set_title("16 trainers with preloading,\nlognormal load times", fontsize=9)
    axis.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", nargs="?", type=Path, help="a record (default: the newest)")
    path = parser.parse_args().record or sorted(RESULTS.glob("*-idle_ratio.jsonl"))[-1]

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(row)["results"] for row in path.read_text().splitlines()]
    results = [row for row in rows if "grid" in row][-1]  # a run may be of lanes alone
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    by_trainers(left, results["grid"])
    by_ratio(right, results["near"])
    picture = path.with_suffix(".svg")
    figure.savefig(picture, metadata={"Date": None})
    print(picture.name)


if __name__ == "__main__":
    main()
