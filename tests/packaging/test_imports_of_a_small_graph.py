"""Modules that are imported until the first batch: the user waits for each of them.

A module that fails here belongs to the line below if every small graph needs it; else import it where it is used.
"""

import subprocess
import sys

import pytest

DESCRIBED = """
    pipegraph backends batches bundle capabilities chunk components concurrency contracts error_policy errors
    fingerprints foreign_arguments forks graph handed_out hashed_keys html importing integers parameters planning
    planning.kind planning.plan stage_spec stopping tree units
"""
OPERATORS = """
    engine engine.activity global_generators nested_samplers operators operators.batching operators.collate
    operators.columns operators.drawn_items operators.from_sequence operators.functions operators.ordered
    order order._cache order._stream order.base order.layout order.left order.permutation order.strided_order
"""
PLANNED = """
    engine.kinds engine.kinds.map engine.kinds.random_access engine.kinds.regroup engine.kinds.source
    planning.bundle_chains planning.checks planning.planner planning.rewrites planning.tunable
"""
RUN = """
    closing durations engine.channel engine.contents engine.loader_context engine.memory engine.meter
    engine.pass_totals engine.reorder engine.run engine.runtime engine.staffing engine.stage engine.stage.ahead
    engine.stage.bundle_size engine.stage.cursors engine.stage.epoch_limit engine.stage.failure_notes
    engine.stage.failure_policy engine.stage.groups engine.stage.kept engine.stage.ledger engine.stage.read_positions
    engine.stage.restore engine.stage.row_intake engine.stage.sender engine.stage.snapshots engine.stage.stage_context
    engine.stage.stage_run engine.stage.unit engine.stage_pump engine.stage_worker
    engine.tracing engine.unwanted engine.worker_threads estimates
    loader loader.delivered loader.epoch_pass loader.given_data loader.lengths loader.loader loader.options
    loader.place loader.position loader.ranks loader.runs machine torch_modes totals
"""
IMAGES = """
    numpy.typing numpy._typing._add_docstring engine.kinds.rows
    device device.loans device.packed_copy device.slabs once operators.batch_slabs operators.decode operators.images
    operators.images.choice operators.images.companions operators.images.crop operators.images.decoder
    operators.images.header operators.images.image_batch operators.images.normalize_tables operators.images.nvimgcodec
    operators.images.opencv operators.images.orientation operators.images.pillow
    operators.images.simplejpeg operators.load operators.normalize operators.shared_reader paths
    reader reader.columns_filter reader.prefetch_policy storage storage.folders
"""
INLINE_DATALOADER = """
    pipegraph errors importing integers loader loader.ranks loader.torch_dataloader
    loader.torch_dataloader.batch_progress loader.torch_dataloader.dataloader loader.torch_dataloader.fetching
    loader.torch_dataloader.in_accelerate loader.torch_dataloader.inline_pass nested_samplers parameters
"""
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


@pytest.mark.parametrize(
    ("program", "allowed"),
    [(GRAPH, DESCRIBED + OPERATORS + PLANNED + RUN), (DATALOADER, INLINE_DATALOADER)],
    ids=["a graph of three stages", "a DataLoader without workers"],
)
def test_nothing_is_imported_before_the_first_batch_that_it_does_not_need(program, allowed):
    names = {name.removeprefix("pipegraph.") for name in imported_by(program)}
    ours = {name for name in names if not name.startswith(("torch.", "__editable__"))}
    assert ours - set(allowed.split()) == set()


def test_photographs_need_no_shards_no_stores_no_generators_and_no_pillow(tmp_path):
    pytest.importorskip("cv2")
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x0112] = 6
    for name in "ab":
        image.new("RGB", (9, 9)).save(tmp_path / f"{name}.jpg", exif=exif)
    names = imported_by(PHOTOGRAPHS.format(folder=str(tmp_path)), "cv2")
    ours = {
        name.removeprefix("pipegraph.") for name in names if not name.startswith(("torch.", "__editable__"))
    }
    assert ours - set((DESCRIBED + OPERATORS + PLANNED + RUN + IMAGES).split()) == set()


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
