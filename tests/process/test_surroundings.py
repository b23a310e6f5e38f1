"""Where worker processes must also work: with a small /dev/shm, and in a notebook."""

import pytest

CROSSING = """
import ctypes, subprocess, sys
small = "mount --make-rprivate / && mount -t tmpfs -o size=64m tmpfs /dev/shm"
if ctypes.CDLL(None).unshare(0x20000) or subprocess.run(["sh", "-c", small]).returncode:
    sys.exit(77)  # a mount namespace of its own needs rights
import numpy as np, torch, pipegraph as pg
from pipegraph import operators as ops

graph = pg.Graph("g")
rows = graph.add(ops.FromSequence(range(6)))
rows.then(lambda x: {"a": np.full(4 << 20, x, np.float32), "b": torch.full((4, 1 << 20), float(x))}, name="make",
          workers=2, backend="process")
with graph.loader() as loader:
    kept = [(float(row["a"].max()), float(row["b"].min()), row) for row in loader]  # all at once: 192 MB
assert [(a, b) for a, b, _ in kept] == [(x, x) for x in range(6)]
with open("/proc/mounts") as mounts:
    print([line.split()[3] for line in mounts if line.split()[1] == "/dev/shm"][-1])
"""


def test_a_dev_shm_of_64_mb_is_enough(programs):
    done = programs.run(CROSSING)
    if done.returncode == 77:
        pytest.skip(f"a mount namespace needs rights that are missing here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "size=65536k" in done.stdout


NOTEBOOK = """
import pipegraph as pg
from pipegraph import operators as ops
scale = 10
def table(x):
    return {"x": x, "scaled": x * scale}
graph = pg.Graph("notebook")
rows = graph.add(ops.FromSequence(range(6))).then(lambda x: x + 1, workers=2, backend="process")
rows.then(table, backend="process")
---
with graph.loader() as loader:
    found = [row["scaled"] for row in loader]
print(found)
---
scale = 100  # as a cell that is changed and run again
def table(x):
    return {"scaled": x * scale}
graph = pg.Graph("again")
graph.add(ops.FromSequence(range(3))).then(table, backend="process")
with graph.loader() as loader:
    print([row["scaled"] for row in loader])
"""


@pytest.mark.slow
def test_a_notebook_with_lambdas_in_process_stages():
    nbclient = pytest.importorskip("nbclient", reason="make fuzz installs it")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in NOTEBOOK.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    texts = [
        "".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout") for cell in cells
    ]
    assert texts == ["", "[10, 20, 30, 40, 50, 60]\n", "[0, 100, 200]\n"]
