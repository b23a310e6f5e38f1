"""Real ranks: gloo processes with real shards and torch.distributed.checkpoint; once under torchrun itself."""

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANK = Path(__file__).with_name("elastic_rank.py")
OPTIONS = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
Run = Callable[..., list[list[list[str]]]]


@pytest.fixture
def run(write_shards: Any, tmp_path: Path, programs: Any) -> Run:
    folder, turns = write_shards("tar", 4, 60), itertools.count()

    def start(
        job: str, ranks: int, limit: int = 0, shards: Path = folder, torchrun: bool = False
    ) -> list[list[list[str]]]:
        """Each rank's steps, each a list of ``position:key``."""
        arguments = [job, shards, tmp_path, limit]
        if torchrun:
            command = [sys.executable, *OPTIONS, ranks, RANK, *arguments]
            done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
        else:
            program = f"import runpy; runpy.run_path({str(RANK)!r}, run_name='__main__')"
            group = {"WORLD_SIZE": str(ranks), "GROUP_STORE": str(tmp_path / f"store-{next(turns)}")}
            started = [
                programs.start(program, *arguments, env={**group, "RANK": str(rank)}) for rank in range(ranks)
            ]
            written = [each.communicate() for each in started]
            assert not any(each.returncode for each in started), written
        return [
            json.loads((tmp_path / f"{job}-{ranks}-{limit}-{rank}.json").read_text()) for rank in range(ranks)
        ]

    return start


def positions(ranks: list[list[list[str]]]) -> list[list[int]]:
    """The global batch of each step: sorted positions."""
    return [
        sorted(int(place.partition(":")[0]) for batch in step for place in batch)
        for step in zip(*ranks, strict=True)
    ]


@pytest.mark.slow
def test_an_epoch_over_3_2_4_and_1_ranks_through_checkpoints_is_exact(run: Run) -> None:
    found: list[list[int]] = []
    keys: dict[int, set[str]] = {}
    for ranks, limit in ((3, 4), (2, 5), (4, 3), (1, 0)):
        steps = run("elastic", ranks, limit)
        found += positions(steps)
        for place in itertools.chain.from_iterable(itertools.chain.from_iterable(steps)):
            position, _, key = place.partition(":")
            keys.setdefault(int(position), set()).add(key)
    assert [p for batch in found for p in batch][:246] == list(range(246))
    assert all(batch == list(range(12 * n, 12 * n + 12)) for n, batch in enumerate(found[:20]))
    assert len(set().union(*(keys[p] for p in range(246)))) == 246


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
def test_an_epoch_over_8_6_5_16_7_and_1_ranks_is_read_once(run: Run, write_shards: Any, turn: int) -> None:
    folder = write_shards("npy", 9, 2_800)
    total = sum(2_800 + part for part in range(9))
    stops = random.Random(turn)
    batches: list[list[int]] = []
    keys: Counter[str] = Counter()
    for ranks in (8, 6, 5, 16, 7, 1):
        limit = stops.randrange(1, 4) if ranks > 1 else 0
        steps = run("resized", ranks, limit, folder)
        batches += positions(steps)
        keys.update(
            place.partition(":")[2]
            for place in itertools.chain.from_iterable(itertools.chain.from_iterable(steps))
            if int(place.partition(":")[0]) < total
        )
    assert [place for batch in batches for place in batch][:total] == list(range(total))
    assert all(len(batch) == 1680 for batch in batches[:-1])
    # Every number stands at the head of one row: each was read, and once.
    assert len(keys) == total
    assert set(keys.values()) == {1}


@pytest.mark.slow
def test_a_loader_is_stateful_for_distributed_checkpoints(run: Run) -> None:
    first, rest = run("stateful", 2, 5, torchrun=True), run("stateful", 2, 0)
    for rank in range(2):
        steps = [*first[rank], *rest[rank]]
        assert [int(p.partition(":")[0]) for step in steps for p in step] == list(range(rank, 246, 2))


def test_a_dataloaders_checkpoint_of_one_rank_begins_the_next_epoch_on_two(run: Run) -> None:
    (alone,), two = run("sampled", 1), run("sampled", 2, 4)
    again = run("sampled", 2)
    assert sorted(int(row) for step in alone for row in step) == list(range(60))
    rows = [int(row) for steps in (*two, *again) for step in steps for row in step]
    assert sorted(rows) == list(range(60))


@pytest.mark.slow
def test_a_mesh_dimension_gives_tensor_parallel_ranks_the_same_data(run: Run) -> None:
    steps = run("mesh", 4, 6)
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    assert positions([steps[0], steps[2]]) == [list(range(12 * n, 12 * n + 12)) for n in range(6)]


def test_three_ranks_take_equal_steps_over_filters_and_skips(run: Run) -> None:
    steps = run("unequal", 3)
    assert len({len(each) for each in steps}) == 1
    assert len(steps[0]) > 20
    once = [place for each in steps for batch in each[: len(each) // 2] for place in batch]
    assert len(once) == len(set(once))
