"""Functions that draw from torch's global generator: today's limit, and the way around it that the docs give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import Sequencer

LIMIT = "workers are threads, and share the process's generators (docs/concepts.md says so)"


def delivered(function: Callable[..., Any], n: int, workers: int) -> list[Any]:
    graph = pg.Graph("drawn", seed=3)
    graph.add(ops.FromSequence(range(n))).then(function, workers=workers)
    with graph.loader() as loader:
        return list(loader)


def drawn_in_turn(turns: dict[int, int]) -> list[float]:
    """What each sample draws, where sample i is the ``turns[i]``-th to draw."""
    step = Sequencer()

    def draw(x: int) -> float:
        with step(turns[x]):
            return float(torch.rand(()))

    torch.manual_seed(0)
    return delivered(draw, 2, workers=2)


@pytest.mark.xfail(strict=True, reason=LIMIT)
def test_a_sample_draws_the_same_from_torch_whichever_worker_comes_first() -> None:
    assert drawn_in_turn({0: 0, 1: 1}) == drawn_in_turn({0: 1, 1: 0})


@pytest.mark.xfail(strict=True, reason=LIMIT)
def test_a_pipeline_that_draws_from_torch_leaves_the_training_threads_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    delivered(lambda x: torch.rand(()), 4, workers=1)
    assert torch.equal(torch.rand(3), expected)


def test_a_torch_generator_made_from_a_samples_own_depends_on_nothing_else() -> None:
    def draw(x: int, rng: np.random.Generator) -> float:
        own = torch.Generator().manual_seed(int(rng.integers(1 << 63)))
        return float(torch.rand((), generator=own))

    before = torch.get_rng_state()
    assert delivered(draw, 20, workers=1) == delivered(draw, 20, workers=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_handle_that_open_makes_is_each_workers_own() -> None:
    """The way for data sets with lazy handles; ``FromSequence`` shares its data set among all workers."""

    class Rows(pg.Source):
        random_access = True

        def open(self, context: pg.Context) -> None:
            self.handle = object()  # such as a connection, or a file

        def length(self, epoch: int, rank: int, world_size: int) -> int:
            return len(range(rank, 40, world_size))

        def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
            return iter(range(rank + start * world_size, 40, world_size))

        def read(self, position: int, epoch: int) -> tuple[int, object]:
            return position, self.handle

    graph = pg.Graph("handles")
    graph.add(Rows(), workers=3)
    with graph.loader() as one, graph.loader() as other:
        mine, others = list(one), list(other)
    assert [position for position, _ in mine] == [position for position, _ in others] == list(range(40))
    handles = {id(handle) for _, handle in mine}
    assert not handles & {id(handle) for _, handle in others}
