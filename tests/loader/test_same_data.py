"""Ranks that see different data are an error that says which rank sees what; nobody waits who would not anyway."""

import json
import re
import shutil

import pytest

RANK = """
import json, sys
import torch.distributed as dist
import pipegraph as pg
from pipegraph import operators as ops

rank, store, mode, folders = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(folders))

def loader_of(folder, seed, order=None, **options):
    graph = pg.Graph("g", seed=seed)
    graph.add(ops.ShardSelect(folder + "/*.jsonl", order=order), name="select").then(ops.Load())
    return graph.loader(**options)

seed, options = {"drawn": (None, {}), "alone": (0, {})}.get(mode, (0, {"equal_steps": True}))
if mode == "nodes":  # each rank is a node of its own, with two ranks
    options = {"rank": 0, "world_size": 2}
found, error = [], ""
try:
    if mode != "alone" or rank == 0:
        if mode == "seeds":
            seed = rank
        if mode == "orders":
            options["order"] = pg.order.BlockOrder() if rank else pg.order.LaneOrder()
        with loader_of(folders[rank], seed, **options) as loader:
            if mode == "epochs":
                loader.set_epoch(rank)
            if mode == "all states" or mode == "states" and rank:
                with loader_of(folders[rank], seed, rank=rank, world_size=2) as before:
                    next(iter(before))
                    loader.load_state_dict(before.state_dict())
            for sample in loader:
                found.append(sample["n"])
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
print(json.dumps([found, error]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Two whole copies of six shards of ten samples, and one that lacks a shard."""
    monkeypatch.setenv("PIPEGRAPH_CACHE", str(tmp_path / "made"))
    whole = tmp_path / "whole"
    whole.mkdir()
    for part in range(6):
        lines = "".join(json.dumps({"n": 10 * part + n}) + "\n" for n in range(10))
        (whole / f"part-{part}.jsonl").write_text(lines)
    shutil.copytree(whole, tmp_path / "copy")
    shutil.copytree(whole, tmp_path / "less")
    (tmp_path / "less" / "part-3.jsonl").unlink()
    return tmp_path


def run(programs, copies, mode, *names):
    processes = [
        programs.start(RANK, rank, copies / "store", mode, *(copies / name for name in names))
        for rank in range(len(names))
    ]
    found = []
    for process in processes:
        with process:
            out, err = process.communicate()
            assert process.returncode == 0, err
            found.append(json.loads(out))
    return found


WHOLE = (
    r"rank 0: stage 'select': 6 shards, 60 samples, digest \w{12}, LaneOrder .*; "
    r"rank 1: stage 'select': 5 shards, 50 samples, digest \w{12}, .*\. Give all"
)


@pytest.mark.parametrize("mode", ["drawn", "equal"])
def test_ranks_that_agree_on_something_compare_their_data_before_the_first_sample(programs, copies, mode):
    for found, error in run(programs, copies, mode, "whole", "less"):
        assert found == []
        assert error.startswith("DataError: the ranks read different data")
        assert re.search(WHOLE, error)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("seeds", "rank 0: .*, seed 0; epoch 0; rank 1: .*, seed 1; epoch 0. Give all"),
        ("orders", "rank 0: .* LaneOrder .*; rank 1: .* BlockOrder .*. Give all"),
        ("epochs", "rank 0: .* epoch 0; rank 1: .* epoch 1. Give all"),
        ("states", "rank 0: .* epoch 0; rank 1: .* a state. Give all"),
    ],
)
def test_ranks_that_would_deal_the_same_data_differently_are_an_error(programs, copies, mode, said):
    for found, error in run(programs, copies, mode, "whole", "copy"):
        assert found == []
        assert re.search(said, error)


def test_ranks_that_resume_from_states_of_their_own_agree(programs, copies):
    found = run(programs, copies, "all states", "whole", "copy")
    assert [(len(samples), error) for samples, error in found] == [(29, ""), (29, "")]


def test_copies_of_the_same_data_are_the_same(programs, copies):
    found = run(programs, copies, "drawn", "whole", "copy")
    assert [error for _, error in found] == ["", ""]
    assert sum(len(samples) for samples, _ in found) == 60


def test_a_loader_on_one_rank_only_waits_for_nobody(programs, copies):
    (found, error), _ = run(programs, copies, "alone", "whole", "less")
    assert error == ""
    assert len(found) == 30


def test_nodes_with_data_and_ranks_of_their_own_are_not_compared(programs, copies):
    found = run(programs, copies, "nodes", "whole", "less")
    assert [(len(samples), error) for samples, error in found] == [(30, ""), (25, "")]
