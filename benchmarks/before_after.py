"""This tree beside another one, such as a worktree of an earlier commit: microseconds per item, alternated.

Wall time and CPU time of all threads, each span in a process of its own; the ratio is other / this per round, so above
1.0 this tree is faster.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before --rounds 5
    python benchmarks/before_after.py ../before --only hop:1,hop:16,rows,tokens
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import hop_cost
import small_rows
import tokens

HERE = Path(__file__).resolve()
CONTESTANTS = ("hop:1", "hop:4", "hop:16", "rows", "batches", "tokens", "windows")


def stream_of(name: str, folder: str) -> tuple[AbstractContextManager[Any], int, int]:
    """A contestant's stream, what to take at a time, and items in each of these."""
    kind, _, argument = name.partition(":")
    if kind == "hop":
        return hop_cost.pipegraph(int(argument)), 256, 1
    if kind in ("rows", "batches"):
        stream = small_rows.pipegraph_rows if kind == "rows" else small_rows.pipegraph_batches
        return stream(small_rows.Rows()), 1, small_rows.BATCH
    windows = tokens.Windows(tokens.write(folder))
    stream = tokens.pipegraph_batches if kind == "tokens" else tokens.pipegraph_windows
    return stream(windows), 1, tokens.BATCH


def child(name: str, seconds: float) -> None:
    """One span; prints JSON."""
    small_rows.one_thread_each()
    with tempfile.TemporaryDirectory() as folder:
        context, step, weight = stream_of(name, folder)
        with context as stream:
            items, taken = iter(stream), 0
            for _ in islice(items, 40 * step):
                pass
            cpu, wall = time.process_time(), time.perf_counter()
            while time.perf_counter() - wall < seconds:
                taken += sum(weight for _ in islice(items, step))
            spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    print(json.dumps({key: 1e6 * value / taken for key, value in spent.items()}))


def measured(tree: Path, name: str, seconds: float) -> dict[str, float]:
    """One span of a contestant on a tree."""
    command = [sys.executable, str(HERE), str(tree), "--child", name, "--seconds", str(seconds)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="root of the other tree")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each span takes")
    parser.add_argument("--child", default="", help="(the script's own use)")
    options = parser.parse_args()
    if options.child:
        child(options.child, options.seconds)
        return
    trees = {"this": HERE.parent.parent, "other": options.other.resolve()}
    rows = []
    for name in options.only.split(","):
        rounds = [
            {tree: measured(path, name, options.seconds) for tree, path in trees.items()}
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
