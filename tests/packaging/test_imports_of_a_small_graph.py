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
PROCESSES = GRAPH.replace("workers=2", "workers=2, backend='process'")
PHOTOGRAPHS = """
import pipegraph as pg
from pipegraph import operators as ops
graph = pg.Graph("photographs")
samples = graph.add(ops.ListFiles({folder!r})).then(ops.Load()).then(ops.Batch(2))
samples.then(ops.DecodeImage(8, backend="opencv"), workers=2)
assert next(iter(graph.loader()))["image"].shape == (2, 8, 8, 3)
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


def test_photographs_need_no_stores_and_no_processes(tmp_path):
    pytest.importorskip("cv2")
    image = pytest.importorskip("PIL.Image")
    for name in "ab":
        image.new("RGB", (9, 9)).save(tmp_path / f"{name}.jpg")
    names = imported_by(PHOTOGRAPHS.format(folder=str(tmp_path)), "cv2")
    assert heavy(names) <= {
        "order",
        "planning",
        "engine",
        "loader",
        "operators",
        "device",
        "storage",
        "reader",
        "PIL",
    }
    assert not {"pipegraph.storage.stores", "pipegraph.engine.process", "pipegraph.storage.formats"} & set(
        names
    )


BRINK = """
import gc, torch, numpy, torch.utils.data
gc.collect()
gc.disable()
new = [[] for _ in range(len(gc.get_objects()) // 2)]
for _ in range(11):
    gc.collect(1)
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
gc.enable()
"""


@pytest.mark.parametrize(
    "program", [GRAPH, PROCESSES, DATALOADER], ids=["threads", "processes", "DataLoader"]
)
def test_imports_do_not_bring_a_full_collection(program):
    """Each walks all of torch's objects. The user's own objects still bring it: many more than a small graph makes."""
    lines = [BRINK, program, "print(len(full), gc.isenabled(), flush=True)"]
    lines += ["more = [[] for _ in range(200_000)]", "print(len(full) > 0, flush=True)"]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["0 True", "True"]
