"""Which rank this is: asked when iteration starts; the seed that all ranks share."""

import json

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError
from pipegraph.loader.options import agree_on_seed, resolve

pytestmark = pytest.mark.usefixtures("no_leaks")


def make(seed=0):
    graph = pg.Graph("g", seed=seed)
    graph.add(ops.FromSequence(range(8)))
    return graph


def test_rank_and_world_size_as_given():
    for rank in range(2):
        with make().loader(rank=rank, world_size=2) as loader:
            assert len(loader) == 4
            assert list(loader) == [rank, rank + 2, rank + 4, rank + 6]


def test_else_torchruns_environment_at_iteration_time(monkeypatch):
    loader = make().loader()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(loader) == [1, 5]
    loader.close()


def test_else_one_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert resolve(None, None) == (0, 1)


def test_from_iterable_deals_its_items_out_unless_told_not_to():
    def run(shard, rank):
        graph = pg.Graph("g")
        graph.add(ops.FromIterable(range(5), shard=shard))
        with graph.loader(rank=rank, world_size=2) as loader:
            return [(c.data, int(c.positions[0])) for c in loader.chunks()]

    assert run(True, 0) == [(0, 0), (2, 2), (4, 4)]
    assert run(True, 1) == [(1, 1), (3, 3)]
    assert run(False, 1) == [(i, i) for i in range(5)]


def test_ranks_with_unknown_counts_must_say_how_to_end():
    graph = make()
    graph.add(ops.Filter(bool), graph.add(ops.FromSequence(range(8)), name="s"), name="f")
    with (
        graph.loader("f", rank=0, world_size=2) as loader,
        pytest.raises(
            GraphError,
            match=r"stages 'f' make the number of steps depend on the data: with 2 ranks say loader\(equal_steps=True\)",
        ),
    ):
        iter(loader)
    with graph.loader("f", rank=0, world_size=2, equal_steps=False) as loader:
        assert list(loader) == [2, 4, 6]


def test_a_seed_of_none_is_drawn_once_and_kept_in_the_state():
    def run(state=None):
        graph = pg.Graph("g", seed=None)
        graph.add(ops.FromSequence(range(4))).then(lambda x, rng: float(rng.random()), name="draw")
        with graph.loader(epochs=2) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return list(loader), json.loads(json.dumps(loader.state_dict()))

    first, state = run()
    other, _ = run()
    assert first != other
    second, _ = run(state)
    again, _ = run(state)
    assert second == again
    assert set(second) & set(first) == set()


def test_a_seed_of_none_with_several_ranks_needs_a_group():
    with (
        make(seed=None).loader(rank=0, world_size=2) as loader,
        pytest.raises(
            GraphError,
            match=r"seed=None with 2 ranks needs an initialised torch.distributed group to agree on one; give Graph\(seed=",
        ),
    ):
        iter(loader)
    assert agree_on_seed(7, 0, 2) == 7


WORKER = """
import json, sys
import torch.distributed as dist
import pipegraph as pg
from pipegraph import operators as ops

rank, store = int(sys.argv[1]), sys.argv[2]
graph = pg.Graph("g", seed=None)
graph.add(ops.FromSequence(range(6))).then(lambda x, rng: [x, float(rng.random())], name="draw")
loader = graph.loader()          # made before there is a group
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
found = list(loader)
print(json.dumps({"seed": loader.state_dict()["seed"], "rank": list(loader.state_dict())[-1], "found": found}))
loader.close()
dist.destroy_process_group()
"""


def test_two_processes_of_a_gloo_group_share_the_data_and_a_drawn_seed(tmp_path, programs):
    processes = [programs.start(WORKER, rank, tmp_path / "store") for rank in range(2)]
    found = []
    for process in processes:
        with process:
            out, err = process.communicate()
            assert process.returncode == 0, err
            found.append(json.loads(out))
    assert found[0]["seed"] == found[1]["seed"] > 0
    assert [each["rank"] for each in found] == [
        "rank0",
        "rank0",
    ]  # any rank's part of an elastic graph is enough
    assert [x for x, _ in found[0]["found"]] == [0, 2, 4]
    assert [x for x, _ in found[1]["found"]] == [1, 3, 5]
    graph = pg.Graph("g", seed=found[0]["seed"])
    graph.add(ops.FromSequence(range(6))).then(lambda x, rng: [x, float(rng.random())], name="draw")
    with graph.loader(rank=0, world_size=1) as loader:
        whole = list(loader)
    assert whole[0::2] == found[0]["found"] and whole[1::2] == found[1]["found"]
