"""Peak memory of all processes while photographs are decoded: ``image_decode.py`` with 2 and with 4
workers.

Claim: at most half of DataLoader's peak with the same number of workers.

Each measurement is a fresh interpreter. At every delivered batch it adds up what it and all its
descendants hold, as PSS (shared pages are divided among those who share them) and as RSS (each counts
them all, as most tools show it); the peak over 30 batches counts. Beside it: what the interpreter held
before the loader was built, with the imports done.

    python benchmarks/memory_peak.py --images FOLDER --rounds 3
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import image_decode
import images
from images import add_images_option, one_thread_each, photographs
from start_up import modules_of

CLAIM = "peak memory of all processes: at most half of DataLoader's with as many workers"
BATCHES = 30
WORKERS = (2, 4)


def resident_mb() -> tuple[float, float]:
    """(PSS, RSS) of this process and its descendants, in MB; RSS counts a shared page once for each."""
    import psutil

    me = psutil.Process()
    pss = rss = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the two calls
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
        pss += sizes["Pss"]
        rss += sizes["Rss"]
    return pss * 1024 / 1e6, rss * 1024 / 1e6


def child(name: str, folder: str) -> None:
    """One measurement in its own interpreter: prints before and peak as JSON on the last line."""
    import cv2  # noqa: F401
    import torch  # noqa: F401

    paths = photographs(folder)
    one_thread_each()
    for module in modules_of(name):
        importlib.import_module(module)
    contestant = next(c for c in image_decode.contestants(paths) if c.name == name)
    before, _ = resident_mb()
    with contestant.stream() as stream:
        noted = [resident_mb() for _ in islice(iter(stream), BATCHES)]
    pss, rss = (max(column) for column in zip(*noted, strict=True))
    print(json.dumps({"before_mb": before, "pss_mb": pss, "rss_mb": rss}))


def measure(name: str, folder: str, workers: int) -> dict[str, float]:
    """Start the child and read its last line.

    Raises:
        RuntimeError: the child failed; the message is its last line of error.
    """
    command = [sys.executable, __file__, "--child", name, "--images", folder, "--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    sizes: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return sizes


def measured(names: list[str], folder: str, workers: int, rounds: int) -> dict[str, Any]:
    """Spreads by contestant, with the ratio of its peak to DataLoader's; and why one has none."""
    sizes: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, str] = {}
    for _ in range(rounds):
        for name in names:
            if name in missing:
                continue
            try:
                sizes.setdefault(name, []).append(measure(name, folder, workers))
            except RuntimeError as error:
                missing[name] = str(error)[:300]
    results: dict[str, Any] = {"missing": missing, "contestants": {}}
    theirs = sizes.get(image_decode.DATALOADER, [])
    for name, runs in sizes.items():
        if name in missing:
            continue
        entry: dict[str, Any] = {"before_mb": harness.spread(run["before_mb"] for run in runs).to_dict()}
        for size in ("pss_mb", "rss_mb"):
            entry[size] = harness.spread(run[size] for run in runs).to_dict()
            if theirs:
                ratio = harness.spread(a[size] / b[size] for a, b in zip(runs, theirs, strict=False))
                entry[f"{size}_over_dataloader"] = ratio.to_dict()
        results["contestants"][name] = entry
    return results


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=3)
    add_images_option(parser)
    parser.add_argument(
        "--workers", type=int, default=0, help="only this number of workers (default 2, then 4)"
    )
    parser.add_argument("--child", default="", help="(the script's own use) measure one contestant here")
    options = parser.parse_args()
    paths = photographs(options.images)
    if options.child:
        vars(image_decode)["WORKERS"] = options.workers
        child(options.child, options.images)
        return
    counts = (options.workers,) if options.workers else WORKERS
    configuration = {
        "batch": images.BATCH,
        "batches": BATCHES,
        "rounds": options.rounds,
        "workers": list(counts),
    }
    harness.header(CLAIM, configuration)
    names = [c.name for c in harness.chosen(image_decode.contestants(paths), options.only)]
    results, rows = {}, []
    for workers in counts:
        found = results[f"{workers} workers"] = measured(names, options.images, workers, options.rounds)
        for name, entry in sorted(found["contestants"].items(), key=lambda e: e[1]["pss_mb"]["median"]):
            row = [str(workers), name, f"{entry['before_mb']['median']:.0f}"]
            for size in ("pss_mb", "rss_mb"):
                ratio = entry.get(f"{size}_over_dataloader")
                row.append(
                    f"{entry[size]['median']:.0f} ({entry[size]['low']:.0f}-{entry[size]['high']:.0f})"
                )
                row.append(f"{ratio['median']:.2f}" if ratio else "-")
            rows.append(row)
        for name, reason in found["missing"].items():
            rows.append([str(workers), name, "-", "not measured", "-", reason[:60], "-"])
    headers = ["workers", "", "before, MB", "peak PSS, MB", "x DataLoader", "peak RSS, MB", "x DataLoader"]
    print(harness.table(headers, rows))
    if not options.no_record:
        print("recorded in", harness.record("memory_peak", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
