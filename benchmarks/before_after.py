"""This tree beside another one, such as a worktree of an earlier commit: rate and CPU per item, alternated.

Each span runs in a process of its own; ``x other`` above 1 means that this tree is faster. ``start`` is one item: from
the import to the first batch of a small graph in threads; ``start-processes`` the same with two worker processes.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before --rounds 5
    python benchmarks/before_after.py ../before --only hop:1,hop:16,rows,tokens
    python benchmarks/before_after.py ../before --only recipe --images FOLDER
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import harness
import hop_cost
import image_recipe
import python_transform
import small_rows
import start_up
import tokens
from harness import Child, Measures
from images import one_thread_each, photographs

NAMES = "hop:1 hop:4 hop:16 rows batches tokens windows processes recipe start start-processes".split()
TRANSFORM = python_transform.Transform(160)
"""Of a row in ``processes``: some 0.1 ms of plain Python, the same in both trees."""


def measured(name: str, folder: str, images: str | None) -> Measures:
    """One span of our own contestant."""
    one_thread_each()
    kind, _, depth = name.partition(":")
    if kind.startswith("start"):
        way = "pipegraph, processes" if kind == "start-processes" else "pipegraph, threads"
        found = start_up.measured(way, "")
        return harness.run(found["both_s"], found["cpu_s"], 1)
    entered: dict[str, tuple[Any, str]] = {
        "hop": (lambda: hop_cost.contestants(int(depth), 0.5), "pipegraph"),
        "rows": (lambda: small_rows.contestants(small_rows.Rows()), "pipegraph, rows"),
        "batches": (lambda: small_rows.contestants(small_rows.Rows()), "pipegraph, batches"),
        "tokens": (lambda: tokens.contestants(tokens.Windows(tokens.write(folder))), tokens.OURS),
        "windows": (lambda: tokens.contestants(tokens.Windows(tokens.write(folder))), "pipegraph, windows"),
        "processes": (lambda: python_transform.contestants(TRANSFORM, 0.1), python_transform.OURS),
        "recipe": (lambda: image_recipe.contestants(photographs(images)), "pipegraph, auto"),
    }
    made, ours = entered[kind]
    return next(contestant for contestant in made() if contestant.name == ours).measure()


def main() -> None:
    parser = harness.arguments(__doc__, images=True)
    parser.add_argument("other", type=Path, help="root of the other tree")
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            harness.answer(partial(measured, options.child, folder, options.images))
        return
    names = options.only.split(",") if options.only else NAMES
    if unknown := [
        name for name in names if name.partition(":")[0] not in {n.partition(":")[0] for n in NAMES}
    ]:
        parser.error(f"--only: no contestant {', '.join(unknown)}; there are {', '.join(NAMES)}")
    trees = {"this": Path(__file__).resolve().parents[1], "other": options.other.resolve()}
    options.only = ""
    for name in names:
        command = [__file__, str(options.other), "--child", name]
        command += ["--images", options.images] if options.images else []
        entered = [Child(tree, command, {"PYTHONPATH": str(path)}) for tree, path in trees.items()]
        print(f"\n{name}")
        harness.contest(entered, harness.once, ["other"], options)


if __name__ == "__main__":
    main()
