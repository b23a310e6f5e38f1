"""Peak memory of all processes while photographs are decoded: ``image_decode.py`` with 2 and with 4
workers.

Claim: the peak RSS of all processes is at most half of DataLoader's with the same number of workers.

Each measurement is a fresh interpreter. The consumer takes a step of 0.15 s with each batch, longer than
making one takes, so that everything that may be buffered is: DataLoader's default is two batches ahead
per worker, and everyone has as many here. Before and after every step it adds up what it and all its
descendants hold: as RSS (each process counts the pages it shares, as most tools show it) and as PSS
(shared pages are divided among those who share them, so forked workers hardly count what they inherit).
The peak over 16 batches counts. ``before`` is the RSS of the interpreter with the imports done and no
loader built. ``added`` is what the loader itself costs: the rise of anonymous and shared memory (by PSS,
without the pages of files, which also other programs on the machine may share).

    python benchmarks/memory_peak.py --images FOLDER --rounds 3
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import image_decode
import images
from images import add_images_option, one_thread_each, photographs
from start_up import modules_of

CLAIM = "peak RSS of all processes: at most half of DataLoader's with as many workers"
BATCHES = 16
STEP_S = 0.15
WORKERS = (2, 4)
AHEAD = 2  # batches per worker: DataLoader's default
# One way each; --only finds the others too.
NAMES = (
    image_decode.IDEAL, image_decode.OURS, "pipegraph: map, batch", image_decode.DATALOADER,
    "torchdata.nodes, threads", "SPDL, per batch", "Grain, read threads", "WebDataset, processes",
    "DALI, own decoder",
)  # fmt: skip
SIZES = ("rss_mb", "pss_mb", "added_mb")


def resident_mb() -> tuple[float, float, float]:
    """(RSS, PSS, PSS of what is no file) of this process and its descendants, in MB."""
    import psutil

    me = psutil.Process()
    found = dict.fromkeys(("Rss", "Pss", "Pss_Anon", "Pss_Shmem"), 0)
    for process in [me, *me.children(recursive=True)]:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the two calls
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
        for name in found:
            found[name] += sizes.get(name, 0)
    rss, pss, anonymous, shared = (nkib * 1024 / 1e6 for nkib in found.values())
    return rss, pss, anonymous + shared


def child(name: str, folder: str, workers: int) -> dict[str, float]:
    """One measurement in this interpreter, which did nothing else before."""
    import cv2  # noqa: F401
    import torch  # noqa: F401

    vars(image_decode).update(WORKERS=workers, PREFETCH=AHEAD * workers, READY=(AHEAD - 1) * workers)
    paths = photographs(folder)
    one_thread_each()
    for module in modules_of(name):
        importlib.import_module(module)
    contestant = next(c for c in image_decode.contestants(paths) if c.name == name)
    before, _, data = resident_mb()
    noted = []
    with contestant.stream() as stream:
        for _held in islice(iter(stream), BATCHES):  # as a training loop holds its batch
            noted.append(resident_mb())
            time.sleep(STEP_S)
            noted.append(resident_mb())
    rss, pss, most = (max(column) for column in zip(*noted, strict=True))
    return {"before_mb": before, "rss_mb": rss, "pss_mb": pss, "added_mb": most - data}


def measured(names: list[str], folder: str, workers: int, rounds: int) -> dict[str, Any]:
    """Spreads by contestant, with the ratio of its peak to DataLoader's; and why one has none."""
    sizes: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    command = [sys.executable, __file__, "--images", folder, "--workers", str(workers), "--child"]
    for number in range(rounds):
        for name in names:
            if name in missing:
                continue
            try:
                sizes[name].append(harness.ask([*command, name]))
            except RuntimeError as error:
                missing[name] = str(error)[:300]
            shown = missing.get(name) or f"{sizes[name][-1]['rss_mb']:,.0f} MB"
            print(f"  round {number + 1}: {workers} workers, {name:<34} {shown}", file=sys.stderr, flush=True)
    results: dict[str, Any] = {"missing": missing, "contestants": {}}
    theirs = [] if image_decode.DATALOADER in missing else sizes.get(image_decode.DATALOADER, [])
    for name in (name for name in names if name not in missing):
        entry = {size: harness.spread(run[size] for run in sizes[name]).to_dict() for size in SIZES}
        entry["before_mb"] = harness.spread(run["before_mb"] for run in sizes[name]).to_dict()
        if theirs:
            for size in SIZES:
                pairs = zip(sizes[name], theirs, strict=True)
                ratio = harness.spread(ours[size] / other[size] for ours, other in pairs)
                entry[f"{size}_over_dataloader"] = ratio.to_dict()
        results["contestants"][name] = entry
    return results


def lines(workers: int, found: dict[str, Any]) -> list[list[str]]:
    """Rows of the printed table, the least memory first."""
    rows = []
    for name, entry in sorted(found["contestants"].items(), key=lambda e: e[1]["rss_mb"]["median"]):
        row = [str(workers), name, f"{entry['before_mb']['median']:.0f}"]
        for size in SIZES:
            ratio = entry.get(f"{size}_over_dataloader")
            row.append(f"{entry[size]['median']:.0f} ({entry[size]['low']:.0f}-{entry[size]['high']:.0f})")
            row.append(f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "-")
        rows.append(row)
    return rows


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
        try:
            found = child(options.child, options.images, options.workers)
        except Exception as error:
            print(json.dumps({"error": harness.reason(error)}))
        else:
            print(json.dumps(found))
        return
    counts = (options.workers,) if options.workers else WORKERS
    configuration = {
        "batch": images.BATCH, "batches": BATCHES, "step_s": STEP_S, "ahead_per_worker": AHEAD,
        "rounds": options.rounds, "workers": list(counts),
    }  # fmt: skip
    harness.header(CLAIM, configuration)
    everyone = harness.chosen(image_decode.contestants(paths), options.only)
    names = [c.name for c in everyone if options.only or c.name in NAMES]
    results, rows = {}, []
    for workers in counts:
        found = results[f"{workers} workers"] = measured(names, options.images, workers, options.rounds)
        rows += lines(workers, found)
    headers = ["workers", "", "before, MB"]
    for size in ("peak RSS, MB", "peak PSS, MB", "added, MB"):
        headers += [size, "x DataLoader"]
    print(harness.table(headers, rows))
    for count, found in results.items():
        for name, reason in found["missing"].items():
            print(f"not measured: {count}, {name}: {reason}")
    if not options.no_record:
        print("recorded in", harness.record("memory_peak", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
