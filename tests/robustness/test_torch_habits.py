"""What people bring from torch: samplers, datasets, saving at any point, Ctrl-C, and arguments that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import data

import pipegraph as pg
from pipegraph import operators as ops


def delivered(*stages: Any, **options: Any) -> list[Any]:
    graph = pg.Graph("habits")
    node = graph.add(stages[0])
    for stage in stages[1:]:
        node = node.then(stage)
    with graph.loader(**options) as loader:
        return list(loader)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


NUMBERS = list(range(10))
SAMPLERS = {
    "random": lambda: data.RandomSampler(NUMBERS, generator=seeded(3)),
    "with replacement": lambda: data.RandomSampler(NUMBERS, True, 25, generator=seeded(3)),
    "weighted": lambda: data.WeightedRandomSampler([0.0, 1.0, 2.0], 9, generator=seeded(3)),
    "subset": lambda: data.SubsetRandomSampler(range(3, 9), generator=seeded(3)),
    "distributed": lambda: data.DistributedSampler(NUMBERS, 3, 1, seed=4),
    "list": lambda: [5, 5, 1],
    "tensor": lambda: torch.tensor([2, 0]),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_the_batches_that_a_dataloader_makes_of_it(name: str) -> None:
    expected = [b.tolist() for b in data.DataLoader(NUMBERS, 4, sampler=SAMPLERS[name]())]
    batches = delivered(ops.FromSequence(NUMBERS, sampler=SAMPLERS[name]()), ops.Batch(4))
    assert [batch.tolist() for batch in batches] == expected


def test_a_fast_path_that_fails_or_is_short_falls_back_to_single_items() -> None:
    class Short:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> int:
            if index == 33:
                raise KeyError(index)
            return index

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[i] for i in indices][: 10 if indices[0] < 16 else None]

    graph = pg.Graph("short")
    graph.add(ops.FromSequence(Short()), on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert list(loader) == [i for i in range(40) if i != 33]


def modes() -> tuple[Any, ...]:
    """What torch's modes make of this thread's tensors."""
    made = (torch.ones(2, requires_grad=True) * 2).requires_grad
    return (
        made,
        torch.is_inference_mode_enabled(),
        (torch.eye(2) @ torch.eye(2)).dtype,
        torch.ones(1).device.type,
    )


PLAIN = (True, False, torch.float32, "cpu")
MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("backend", ["thread", "inline", "process"])
@pytest.mark.parametrize("mode", MODES)
def test_the_loops_torch_modes_do_not_reach_a_stage(mode: str, backend: Any) -> None:
    # They reached inline stages, and the processes forked below them: the backend decided the data.
    graph = pg.Graph("modes")
    graph.add(ops.FromSequence(range(2))).then(lambda x: (x, modes()), name="modes", backend=backend)
    with MODES[mode]():
        there = modes()
        with graph.loader() as loader:
            assert list(loader) == [(0, PLAIN), (1, PLAIN)]
        assert modes() == there != PLAIN
