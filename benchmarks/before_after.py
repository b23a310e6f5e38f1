"""This tree beside another one, such as a worktree of an earlier commit: microseconds per item, alternated.

Wall time and CPU time of all threads and worker processes, each span in a process of its own; the ratio is
other / this per round, so above 1.0 this tree is faster. ``start`` is one item: from the import to the first batch of a
small graph; ``start-processes`` the same with two worker processes.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before --rounds 5
    python benchmarks/before_after.py ../before --only hop:1,hop:16,rows,tokens
    python benchmarks/before_after.py ../before --only recipe --images FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import hop_cost
import image_recipe
import python_transform
import small_rows
import start_up
import tokens
from images import add_images_option, photographs

HERE = Path(__file__).resolve()
CONTESTANTS = ("hop:1", "hop:4", "hop:16", "rows", "batches", "tokens", "windows", "processes", "recipe")
KINDS = {name.partition(":")[0] for name in CONTESTANTS}
STARTS = {"start": 0, "start-processes": 2}
"""What is measured once in each process, and its workers."""

WORDS = 160
"""Of a row in ``processes``: some 0.1 ms of plain Python, the same in both trees."""


def stream_of(name: str, folder: str, images: str | None) -> tuple[AbstractContextManager[Any], int, int]:
    """A contestant's stream, what to take at a time, and items in each of these."""
    kind, _, argument = name.partition(":")
    if kind == "hop":
        return hop_cost.pipegraph(int(argument)), 256, 1
    if kind == "processes":
        transform = python_transform.Transform(WORDS)
        return python_transform.pipegraph(transform, "process"), 1, python_transform.BATCH
    if kind == "recipe":
        return image_recipe.pipegraph(photographs(images), "auto"), 1, image_recipe.BATCH
    if kind in ("rows", "batches"):
        stream = small_rows.pipegraph_rows if kind == "rows" else small_rows.pipegraph_batches
        return stream(small_rows.Rows()), 1, small_rows.BATCH
    windows = tokens.Windows(tokens.write(folder))
    stream = tokens.pipegraph_batches if kind == "tokens" else tokens.pipegraph_windows
    return stream(windows), 1, tokens.BATCH


def child(name: str, seconds: float, images: str | None) -> None:
    """One span; prints JSON."""
    small_rows.one_thread_each()
    taken = 0
    if name in STARTS:
        import torch  # noqa: F401

        before, wall = harness.cpu_seconds(), time.perf_counter()
        batches = first_batches(STARTS[name])
        next(batches)
        taken, wall, after = 1, time.perf_counter() - wall, harness.cpu_seconds()
        batches.close()
    else:
        with tempfile.TemporaryDirectory() as folder:
            context, step, weight = stream_of(name, folder, images)
            with context as stream:
                items = iter(stream)
                for _ in islice(items, 10 if name == "recipe" else 40 * step):
                    pass
                before, wall = harness.cpu_seconds(), time.perf_counter()
                while time.perf_counter() - wall < seconds:
                    taken += sum(weight for _ in islice(items, step))
                wall, after = time.perf_counter() - wall, harness.cpu_seconds()
    spent = {"wall": wall, "cpu": harness.spent_s(before, after)}
    print(json.dumps({key: 1e6 * value / taken for key, value in spent.items()}))


def first_batches(workers: int) -> Generator[Any]:
    """Batches of a small graph, read by so many worker processes (0: by a thread)."""
    start_up.import_what("pipegraph")
    import pipegraph as pg
    from pipegraph import operators as ops

    data: Any = range(small_rows.BATCH)  # no more: what workers do ahead is not part of a start
    graph = pg.Graph("start")
    places: Any = {"workers": workers, "backend": "process"} if workers else {}
    graph.add(ops.FromSequence(data), **places).then(ops.Batch(small_rows.BATCH))
    with graph.loader() as loader:
        yield from loader


def measured(tree: Path, name: str, seconds: float, images: str | None) -> dict[str, float]:
    """One span of a contestant on a tree."""
    command = [sys.executable, str(HERE), str(tree), "--child", name, "--seconds", str(seconds)]
    command += ["--images", images] if images else []
    # Both trees keep their compiled modules, or a start would be that of the compiler.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="root of the other tree")
    known = ", ".join([*CONTESTANTS, *STARTS])
    parser.add_argument("--only", default="", help=f"contestants, with commas: {known}")
    add_images_option(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each span takes")
    parser.add_argument("--child", default="", help="(the script's own use)")
    options = parser.parse_args()
    if options.child:
        child(options.child, options.seconds, options.images)
        return
    names = options.only.split(",") if options.only else [*CONTESTANTS, *STARTS]
    if unknown := [name for name in names if name not in STARTS and name.partition(":")[0] not in KINDS]:
        parser.error(f"--only: no contestant {', '.join(unknown)}; there are {known}")
    trees = {"this": HERE.parent.parent, "other": options.other.resolve()}
    rows = []
    for name in names:
        for path in trees.values():
            measured(path, name, 0.1, options.images)  # compiles what is not yet
        rounds = [
            {tree: measured(path, name, options.seconds, options.images) for tree, path in trees.items()}
            for _ in range(options.rounds)
        ]
        cells = [name]
        for clock in ("wall", "cpu"):
            cells.append(str(harness.spread(each["this"][clock] for each in rounds)))
            cells.append(str(harness.spread(each["other"][clock] / each["this"][clock] for each in rounds)))
        rows.append(cells)
        print("  ".join(cells), flush=True)
    print(harness.table(["", "wall us", "other / this", "CPU us", "other / this"], rows))


if __name__ == "__main__":
    main()
