"""What starting costs: the import on top of ``import torch``, and the time from building a loader to its first batch.

Claim: ``import pipegraph`` adds at most 0.15 s to ``import torch``; the first batch comes no later than any peer's.

Every measurement is a fresh interpreter, in turn over the contestants; torch, numpy and OpenCV are imported before the
clock starts. The first batch is one of three:

    python benchmarks/start_up.py --images FOLDER --rounds 5    # that of image_decode.py: 64 photographs, 2 workers
    python benchmarks/start_up.py --of processes --rounds 5     # small rows from two worker processes
    python benchmarks/start_up.py --of threads --rounds 5       # small rows, and no process

Of processes nothing but their start is timed: against DataLoader's by each start method, from a trainer that has a
thread, which must not be forked, and the second loader of a script, behind one that has ended.

CPU time is that of the process and of those that it has started, up to the first batch. What scripts with several
loaders save, and what is not on the way to the first batch, is seen there: on a loaded machine too.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import harness
import image_decode
from harness import Child, Clock, Measures
from images import BATCH, WORKERS, one_thread_each, photographs

CLAIM = "import pipegraph adds <= 0.15 s to import torch; first batch no later than any peer's"
THREADED = "pipegraph, trainer with a thread"
SECOND = ", second loader"
SMALL: dict[str, tuple[str, ...]] = {
    "processes": (
        "pipegraph, processes",
        "pipegraph, DataLoader",
        "pipegraph, DataLoader" + SECOND,
        THREADED,
        "DataLoader, fork",
        "DataLoader, fork" + SECOND,
        "DataLoader, forkserver",
        "DataLoader, spawn",
    ),
    "threads": ("pipegraph, threads", "DataLoader, no worker", "torchdata.nodes, threads"),
}
# What a user of each imports, modules or names of them; a contestant of image_decode is known by the start of its name.
MODULES: dict[str, tuple[str, ...]] = {
    "hand-written": (),
    "pipegraph, DataLoader": ("pipegraph:DataLoader",),
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


def import_what(name: str) -> None:
    """As the contestant's user does."""
    for module in next(modules for start, modules in MODULES.items() if name.startswith(start)):
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


def small(name: str) -> Generator[Any]:
    """Batches of ``Rows``."""
    name = name.removesuffix(SECOND)
    data: Any = Rows()
    if name == "pipegraph, DataLoader":
        import pipegraph

        yield from pipegraph.DataLoader(data, batch_size=BATCH, num_workers=WORKERS)
    elif name.startswith("pipegraph"):
        import pipegraph as pg
        from pipegraph import operators as ops

        if name == THREADED:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        places: Any = {} if name.endswith("threads") else {"workers": WORKERS, "backend": "process"}
        source = pg.Graph("start").add(ops.FromSequence(data), **places)
        with harness.loaded(source.then(ops.Batch(BATCH))) as loader:
            yield from loader
    elif name.startswith("torchdata"):
        import peers
        import torch

        with peers.nodes(range(len(data)), torch.tensor, batch=BATCH) as batches:
            yield from batches
    else:
        from torch.utils.data import DataLoader

        method = name.removeprefix("DataLoader, ")
        places = {} if method == "no worker" else {"num_workers": WORKERS, "multiprocessing_context": method}
        yield from DataLoader(data, batch_size=BATCH, **places)


def measured(name: str, folder: str) -> Measures:
    """One measurement, in its own interpreter; without a folder, of small rows."""
    import cv2  # noqa: F401
    import torch  # noqa: F401

    paths = photographs(folder) if folder else []
    one_thread_each()
    if name.endswith(SECOND):
        import_what(name)
        for _ in small(name):
            pass
    clock = Clock()
    import_what(name)
    import_s = clock.read()[0]

    def first(batches: Iterator[Any]) -> Measures:
        next(batches)
        both_s, cpu_s = clock.read()
        return {"import_s": import_s, "first_batch_s": both_s - import_s, "both_s": both_s, "cpu_s": cpu_s}

    if not folder:
        batches = small(name)
        found = first(batches)
        batches.close()
        return found
    contestant = next(c for c in image_decode.contestants(paths) if c.name == name)
    with contestant.stream() as stream:
        return first(iter(stream))


def main() -> None:
    parser = harness.arguments(__doc__, images=True)
    parser.add_argument("--of", choices=["images", *SMALL], default="images", help="whose first batch")
    options = parser.parse_args()
    folder = options.images if options.of == "images" else ""
    if options.child:
        harness.answer(partial(measured, options.child, folder))
        return
    names = SMALL.get(options.of) or [c.name for c in image_decode.contestants(photographs(folder))]
    place = ["--images", folder] if folder else ["--of", options.of]
    contestants = [Child(name, [__file__, *place, "--child", name]) for name in names]
    configuration = {"batch": BATCH, "workers": WORKERS, "reads": options.of}
    script = "start_up" if folder else f"start_up_{options.of}"
    harness.compare(script, CLAIM, configuration, contestants, harness.once, [], options)


if __name__ == "__main__":
    main()
