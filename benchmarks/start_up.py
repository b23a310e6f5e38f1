"""What starting costs: the import on top of ``import torch``, and the time from building a loader to
its first batch.

Claim: ``import pipegraph`` adds at most 0.15 s to ``import torch``; the first batch comes no later than
any peer's.

Every measurement is a fresh interpreter, in turn over the contestants. The first batch is that of
``image_decode.py``: 64 photographs decoded to 224 x 224 by 2 workers; torch, numpy and OpenCV are
imported before the clock starts.

    python benchmarks/start_up.py --images FOLDER --rounds 5
    python benchmarks/start_up.py --processes --rounds 5

With ``--processes`` the batch is of small rows from two worker processes, so that nothing but their start is timed:
against DataLoader's by each start method, from a trainer that has a thread, which must not be forked, and the second
loader of a script, behind one that has ended.

CPU time is that of the process and of those that it has started, up to the first batch. What scripts with several
loaders save, and what is not on the way to the first batch, is seen there: on a loaded machine too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import harness
import image_decode
from images import BATCH, WORKERS, add_images_option, one_thread_each, photographs

LONGEST_S = 60

THREADED = "pipegraph, trainer with a thread"
OUR_DATALOADER = "pipegraph, DataLoader"
SECOND = ", second loader"
IN_PROCESSES = (
    "pipegraph, processes",
    OUR_DATALOADER,
    OUR_DATALOADER + SECOND,
    THREADED,
    "DataLoader, fork",
    "DataLoader, fork" + SECOND,
    "DataLoader, forkserver",
    "DataLoader, spawn",
)
CLAIM = "import pipegraph adds <= 0.15 s to import torch; first batch no later than any peer's"
# What a user of each imports, modules or names of them; a contestant of image_decode is known by the start of its name.
MODULES = {
    "hand-written": (),
    OUR_DATALOADER: ("pipegraph:DataLoader",),
    # `import pipegraph.operators` by itself imports no operator: these are what a simple script uses.
    "pipegraph": (
        "pipegraph:Graph",
        "pipegraph.operators:FromSequence",
        "pipegraph.operators:Map",
        "pipegraph.operators:Batch",
    ),
    "DataLoader": ("torch.utils.data",),
    "torchdata.nodes": ("torchdata.nodes",),
    "SPDL": ("spdl.pipeline",),
    "Grain": ("grain",),
    "WebDataset": ("webdataset",),
    "DALI": ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types"),
}


def modules_of(name: str) -> tuple[str, ...]:
    """What the contestant's user imports."""
    return next(modules for start, modules in MODULES.items() if name.startswith(start))


def import_what(name: str) -> None:
    """As the contestant's user does."""
    for module in modules_of(name):
        package, _, attribute = module.partition(":")
        imported = importlib.import_module(package)
        if attribute:
            getattr(imported, attribute)


class Rows:
    """A map-style dataset of numbers."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        return index


def in_processes(name: str) -> Iterator[Any]:
    """Batches of ``Rows`` from two processes."""
    name = name.removesuffix(SECOND)
    data: Any = Rows()
    if name == OUR_DATALOADER:
        import pipegraph

        yield from pipegraph.DataLoader(data, batch_size=BATCH, num_workers=WORKERS)
        return
    if name.startswith("pipegraph"):
        import pipegraph as pg
        from pipegraph import operators as ops

        if name == THREADED:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        graph = pg.Graph("start")
        graph.add(ops.FromSequence(data), workers=WORKERS, backend="process").then(ops.Batch(BATCH))
        with graph.loader() as loader:
            yield from loader
        return
    from torch.utils.data import DataLoader

    method = name.removeprefix("DataLoader, ")
    yield from DataLoader(data, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context=method)


def process_child(name: str) -> None:
    """As :func:`child`, for ``--processes``."""
    import torch  # noqa: F401

    one_thread_each()
    if name.endswith(SECOND):
        import_what(name)
        for _ in in_processes(name):
            pass
    cpu, begin = harness.cpu_seconds(), time.perf_counter()
    import_what(name)
    opened = time.perf_counter()
    batches = in_processes(name)
    next(batches)
    tell(begin, opened, cpu)
    batches.close()  # type: ignore[attr-defined]


def tell(begin: float, opened: float, cpu: Mapping[tuple[int, float], float]) -> None:
    """The measurement whose first batch has just come, as JSON."""
    first = time.perf_counter()
    cpu_s = harness.spent_s(cpu, harness.cpu_seconds())
    print(
        json.dumps({"import_s": opened - begin, "first_batch_s": first - opened, "cpu_s": cpu_s}), flush=True
    )


def child(name: str, folder: str) -> None:
    """One measurement, in its own interpreter: prints the times as JSON on the last line."""
    import cv2  # noqa: F401
    import torch  # noqa: F401

    paths = photographs(folder)
    one_thread_each()
    cpu, begin = harness.cpu_seconds(), time.perf_counter()
    import_what(name)
    imported = time.perf_counter()
    contestant = next(c for c in image_decode.contestants(paths) if c.name == name)
    chosen_s = time.perf_counter() - imported
    with contestant.stream() as stream:
        iterator = iter(stream)
        next(iterator)
        tell(begin + chosen_s, imported + chosen_s, cpu)
        del iterator


def measure(name: str, folder: str) -> dict[str, float]:
    """Start the child and read its last line.

    Raises:
        RuntimeError: the child failed, the message being its last line of error, or it hangs.
    """
    command = [sys.executable, __file__, "--child", name]
    command += ["--images", folder] if folder else ["--processes"]
    # Compiled modules are kept, as in any installed package: the first, unmeasured round writes them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, capture_output=True, text=True, check=False, env=environment)
    try:
        done = run(command, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no first batch within {LONGEST_S} s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    times: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return times


def rounds_of(
    names: Sequence[str], folder: str, rounds: int
) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """Alternated measurements by name, and why a name has none."""
    measured: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, str] = {}
    for number in range(-1, rounds):
        for name in names:
            if name in missing:
                continue
            try:
                times = measure(name, folder)
            except RuntimeError as error:
                missing[name] = str(error)[:300]
                continue
            if number < 0:
                continue
            measured.setdefault(name, []).append(times)
            print(
                f"  round {number + 1}: {name:<34} {times['first_batch_s']:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    return measured, missing


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    add_images_option(parser)
    parser.add_argument(
        "--processes", action="store_true", help="small rows from worker processes, and no images"
    )
    parser.add_argument(
        "--child", default="", help="(the script's own use) measure one contestant in this process"
    )
    options = parser.parse_args()
    if options.child and options.processes:
        process_child(options.child)
        return
    folder = "" if options.processes else options.images
    paths = [] if options.processes else photographs(options.images)
    if options.child:
        child(options.child, options.images)
        return
    configuration = {
        "batch": BATCH, "workers": WORKERS, "rounds": options.rounds,
        "reads": "rows" if options.processes else "images",
    }  # fmt: skip
    harness.header(CLAIM, configuration)
    if options.processes:
        names = [name for name in IN_PROCESSES if options.only in name]
    else:
        names = [c.name for c in harness.chosen(image_decode.contestants(paths), options.only)]
    measured, missing = rounds_of(names, folder, options.rounds)

    results: dict[str, Any] = {"missing": missing, "contestants": {}}
    rows = []
    yardstick = IN_PROCESSES[0] if options.processes else image_decode.OURS
    ours = measured.get(yardstick)
    for name, times in sorted(measured.items(), key=lambda entry: entry[1][0]["first_batch_s"]):
        imports = harness.spread(t["import_s"] for t in times)
        first = harness.spread(t["first_batch_s"] for t in times)
        cpu = harness.spread(t["cpu_s"] for t in times)
        both = harness.spread(t["import_s"] + t["first_batch_s"] for t in times)
        results["contestants"][name] = {
            "import_s": imports.to_dict(), "first_batch_s": first.to_dict(), "both_s": both.to_dict(),
            "cpu_s": cpu.to_dict(),
        }  # fmt: skip
        ratio = "-"
        if ours:
            pairs = zip(times, ours, strict=False)
            over = harness.spread(t["first_batch_s"] / o["first_batch_s"] for t, o in pairs)
            results["contestants"][name]["first_batch_over_ours"] = over.to_dict()
            ratio = str(over)
        rows.append([name, str(imports), str(first), str(both), str(cpu), ratio])
    headers = [
        "",
        "import after torch, s",
        "first batch, s",
        "both, s",
        "CPU of both, s",
        f"first batch x {yardstick}",
    ]
    print(harness.table(headers, rows))
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    if not options.no_record:
        name = "start_up_processes" if options.processes else "start_up"
        print("recorded in", harness.record(name, CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
