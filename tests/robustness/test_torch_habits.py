"""What people bring from torch: samplers, datasets, saving at any point, Ctrl-C, and arguments that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_resumes_at_any_batch(name: str) -> None:
    def make() -> pg.Graph:
        graph = pg.Graph("sampled")
        graph.add(ops.FromSequence(NUMBERS, sampler=SAMPLERS[name]())).then(ops.Batch(2, collate=list))
        return graph

    whole = list(make().loader())
    for steps in range(len(whole) + 1):
        with make().loader() as loader:
            passing = iter(loader)
            assert [next(passing) for _ in range(steps)] == whole[:steps]
            state = json.dumps(loader.state_dict())
        with make().loader() as loader:
            loader.load_state_dict(json.loads(state))
            assert list(loader) == whole[steps:]


OF_A_GENERATOR: dict[str, Any] = {
    "permutation": lambda: data.RandomSampler(range(9), generator=seeded(1)),
    "with replacement": lambda: data.RandomSampler(
        range(9), replacement=True, num_samples=9, generator=seeded(1)
    ),
    "weights": lambda: data.WeightedRandomSampler([1.0] * 9, 9, generator=seeded(1)),
    "of batches": lambda: data.BatchSampler(data.RandomSampler(range(9), generator=seeded(1)), 2, False),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", OF_A_GENERATOR)
def test_a_sampler_with_a_generator_resumes_in_every_epoch(name: str, times: int) -> None:
    """The generator has moved on from epoch to epoch, and that of the sampler that a new program makes has not."""
    epochs = 2

    class Itself:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: Any) -> Any:
            return index

    def make() -> pg.Graph:
        graph = pg.Graph("sampled")
        source = graph.add(ops.FromSequence(Itself(), sampler=OF_A_GENERATOR[name]()), name="source")
        source.then(ops.Repeat(times)).then(ops.Batch(2, collate=list))
        return graph

    with make().loader(epochs=epochs) as loader:
        whole = [list(loader) for _ in range(epochs)]
    assert whole[0] != whole[1]
    for epoch in range(epochs):
        for steps in range(len(whole[epoch]) + 1):
            with make().loader(epochs=epochs) as loader:
                for _ in range(epoch):
                    list(loader)
                passing = iter(loader)
                assert [next(passing) for _ in range(steps)] == whole[epoch][:steps]
                state = json.dumps(loader.state_dict())
            with make().loader(epochs=epochs) as loader:
                loader.load_state_dict(json.loads(state))
                assert list(loader) == whole[epoch][steps:]
                assert [list(loader) for _ in range(epoch + 1, epochs)] == whole[epoch + 1 :]


def test_a_batch_sampler_gives_lists_of_indices_to_the_data_set() -> None:
    class Lists(data.Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: list[int]) -> list[int]:
            return [10 * i for i in index]

    sampler = data.BatchSampler(data.SequentialSampler(NUMBERS), 4, drop_last=False)
    assert delivered(ops.FromSequence(Lists(), sampler=sampler)) == [
        [0, 10, 20, 30],
        [40, 50, 60, 70],
        [80, 90],
    ]


def test_torchs_own_data_sets() -> None:
    class Stream(data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert delivered(ops.FromSequence(data.ConcatDataset([range(3), range(2)]))) == [0, 1, 2, 0, 1]  # type: ignore[list-item]
    assert delivered(ops.FromIterable(data.ChainDataset([Stream(), Stream()]))) == [0, 1, 2, 0, 1, 2]
    stacked = data.StackDataset(a=[0, 1, 2], b=list("xyz"))
    (batch,) = delivered(ops.FromSequence(stacked), ops.Batch(3))
    assert batch["a"].tolist() == [0, 1, 2] and batch["b"] == ["x", "y", "z"]
    pairs = data.Subset(data.TensorDataset(torch.arange(6), torch.ones(6, 2)), [5, 1, 3])
    (numbers, ones), _ = delivered(ops.FromSequence(pairs), ops.Batch(2))
    assert numbers.tolist() == [5, 1] and ones.shape == (2, 2)


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


def test_a_default_device_does_not_reach_a_stage() -> None:
    torch.set_default_device("meta")
    try:
        graph = pg.Graph("device")
        graph.add(ops.FromSequence(range(2))).then(lambda x: modes(), backend="inline")
        with graph.loader() as loader:
            assert list(loader) == [PLAIN, PLAIN]
        assert modes()[-1] == "meta"
    finally:
        torch.set_default_device(None)
