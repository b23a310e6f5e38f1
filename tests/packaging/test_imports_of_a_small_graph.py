"""The user waits for every module imported before the first batch: what a small program does not use is not imported."""

import subprocess
import sys

import pytest

GRAPH = """
import pipegraph as pg
from pipegraph import operators as ops
graph = pg.Graph("small")
graph.add(ops.FromSequence(range(64))).then(lambda x: x, workers=2).then(ops.Batch(16))
next(iter(graph.loader()))
"""
DATALOADER = "import pipegraph as pg; next(iter(pg.DataLoader(range(64), batch_size=16)))"


def imported_by(program, beside="torch"):
    """What a program imports on top of torch, in a process of its own."""
    lines = [f"import sys, numpy, torch, torch.utils.data, {beside}", "before = set(sys.modules)", program]
    lines.append("print('\\n'.join(sorted(set(sys.modules) - before)), flush=True)")
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()


def heavy(names):
    """The packages among ``names`` that a program imports for what it does not use."""
    found = {name.split(".")[1] for name in names if name.startswith("pipegraph.") and name.count(".") > 1}
    return found | (set(names) & {"PIL", "pyarrow", "obstore", "cloudpickle", "rich", "typer"})


@pytest.mark.parametrize(
    ("program", "allowed"),
    [(GRAPH, {"order", "planning", "engine", "loader", "operators"}), (DATALOADER, {"loader"})],
    ids=["a graph of three stages", "a DataLoader without workers"],
)
def test_nothing_is_imported_before_the_first_batch_that_it_does_not_need(program, allowed):
    assert heavy(imported_by(program)) <= allowed
