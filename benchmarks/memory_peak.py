"""Peak memory of all processes while photographs are decoded: ``image_decode.py`` with 2 and with 4 workers.

Claim: the peak RSS of all processes is at most half of DataLoader's with the same number of workers.

Each measurement is a fresh interpreter. The consumer takes a step of 0.15 s with each batch, longer than making one
takes, so that everything that may be buffered is: DataLoader's default is two batches ahead per worker, and everyone
has as many here. Before and after every step it adds up what it and all its descendants hold: as RSS (each process
counts the pages it shares, as most tools show it) and as PSS (shared pages are divided among those who share them, so
forked workers hardly count what they inherit). The peak over 16 batches counts. ``before`` is the RSS of the
interpreter with the imports done and no loader built. ``added`` is what the loader itself costs: the rise of anonymous
and shared memory (by PSS, without the pages of files, which also other programs on the machine may share).

    python benchmarks/memory_peak.py --images FOLDER --rounds 3
"""

from __future__ import annotations

import time
from functools import partial
from itertools import islice
from pathlib import Path

import harness
import image_decode
import images
from harness import Child, Measures
from images import one_thread_each, photographs
from start_up import import_what

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


def measured(name: str, folder: str, workers: int) -> Measures:
    """One measurement in this interpreter, which did nothing else before."""
    import cv2  # noqa: F401
    import torch  # noqa: F401

    paths = photographs(folder)
    one_thread_each()
    import_what(name)
    ways = image_decode.contestants(paths, workers, AHEAD * workers, (AHEAD - 1) * workers)
    contestant = next(c for c in ways if c.name == name)
    before, _, data = resident_mb()
    noted = []
    with contestant.stream() as stream:
        for _held in islice(iter(stream), BATCHES):  # as a training loop holds its batch
            noted.append(resident_mb())
            time.sleep(STEP_S)
            noted.append(resident_mb())
    rss, pss, most = (max(column) for column in zip(*noted, strict=True))
    return {"before_mb": before, "rss_mb": rss, "pss_mb": pss, "added_mb": most - data}


def main() -> None:
    parser = harness.arguments(__doc__, rounds=3, images=True)
    parser.add_argument(
        "--workers", type=int, default=0, help="only this number of workers (default 2, then 4)"
    )
    options = parser.parse_args()
    if options.child:
        harness.answer(partial(measured, options.child, options.images, options.workers))
        return
    counts = (options.workers,) if options.workers else WORKERS
    configuration = {
        "batch": images.BATCH, "batches": BATCHES, "step_s": STEP_S, "ahead_per_worker": AHEAD,
        "workers": list(counts),
    }  # fmt: skip
    everyone = [c.name for c in image_decode.contestants(photographs(options.images))]
    names = [name for name in everyone if options.only or name in NAMES]
    contestants = {
        f"{count} workers": [
            Child(name, [__file__, "--images", options.images, "--workers", str(count), "--child", name])
            for name in names
        ]
        for count in counts
    }
    harness.compare("memory_peak", CLAIM, configuration, contestants, lambda _: "not checked", [], options)


if __name__ == "__main__":
    main()
