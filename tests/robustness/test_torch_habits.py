"""What people bring from torch: samplers, datasets, saving at any point, Ctrl-C, and arguments that are wrong."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils import data

import pipegraph as pg
from pipegraph import operators as ops, torch_modes


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


def test_a_sampler_with_a_generator_resumes_between_epochs() -> None:
    def make() -> pg.Graph:
        graph = pg.Graph("sampled")
        graph.add(ops.FromSequence(range(9), sampler=OF_A_GENERATOR["permutation"]()))
        return graph

    with make().loader() as loader:
        list(loader)
        state = loader.state_dict()
        following = list(loader)
    with make().loader() as loader:
        loader.load_state_dict(state)
        assert list(loader) == following


class OfItself(data.Sampler[int]):
    """Says that it draws from a sampler, which is itself, and refuses to say its length."""

    def __init__(self, **attributes: Any) -> None:
        self.sampler, self.generator = self, seeded(3)
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(9, generator=self.generator).tolist())

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("attributes", [{}, {"sampler": Mock()}], ids=["itself", "a mock"])
def test_a_sampler_with_an_endless_line_of_samplers_and_no_length_is_drawn_from(attributes: Any) -> None:
    def loader() -> Any:
        return pg.DataLoader(NUMBERS, 2, sampler=OfItself(**attributes))

    def batches(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    expected = [b.tolist() for b in data.DataLoader(NUMBERS, 2, sampler=OfItself(**attributes))]
    passing = iter(first := loader())
    assert next(passing).tolist() == expected[0]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert batches(second) == expected[1:]
    rows = delivered(ops.FromSequence(NUMBERS, sampler=OfItself(**attributes)))
    assert rows == [row for batch in expected for row in batch]


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


@pytest.mark.parametrize("sampler", [iter([1, 2]), 5])
def test_a_sampler_that_serves_one_epoch_at_most_is_refused(sampler: Any) -> None:
    with pytest.raises(pg.errors.GraphError, match="a sampler gives its indices anew for each epoch"):
        ops.FromSequence(NUMBERS, sampler=sampler)


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


class BatchedOnly(data.Dataset[int]):
    """Reads several items at once, as torch's loader asks it to, and none by itself."""

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 5 in indices:
            raise LookupError("no 5")
        return indices


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
@pytest.mark.parametrize("subset", [False, True], ids=["itself", "subset"])
@pytest.mark.parametrize("cached", [False, True], ids=["read", "cached"])
def test_a_dataset_that_only_reads_several_items_at_once_works_on_every_backend(
    backend: Any, subset: bool, cached: bool
) -> None:
    dataset = data.Subset(BatchedOnly(), range(12)) if subset else BatchedOnly()
    graph = pg.Graph("several")
    node = graph.add(ops.FromSequence(dataset), name="read", backend=backend, on_error=pg.Skip(1))
    if cached:
        node.then(ops.Cache("1MB"))
    with graph.loader() as loader:
        assert list(loader) == [each for each in range(12) if each != 5]
        (lost,) = loader.profile().quarantined
        assert (lost.position, lost.error) == (5, "LookupError: no 5")


def shuffled(n: int = 30) -> pg.Graph:
    graph = pg.Graph("shuffled", seed=1)
    numbers = graph.add(ops.FromSequence(range(n), order=pg.order.StridedOrder()))
    drawn = numbers.then(lambda x, rng: (x, int(rng.integers(100))), workers=2)
    drawn.then(ops.Shuffle(8)).then(ops.Batch(3, collate=list))
    return graph


@pytest.mark.parametrize("steps", [0, 1, 9, 10])
def test_a_state_restores_a_loader_that_has_gone_on_and_one_in_the_middle_of_a_pass(steps: int) -> None:
    with shuffled().loader(epochs=3) as loader:
        passing = iter(loader)
        for _ in range(steps):
            next(passing)
        state = copy.deepcopy(loader.state_dict())
        rest = [list(passing), list(loader), list(loader)]
        loader.load_state_dict(state)
        assert [list(loader) for _ in range(3)] == rest
        next(iter(loader))
        loader.load_state_dict(state)
        assert [list(loader) for _ in range(3)] == rest


def test_training_in_pieces_of_four_steps_sees_what_training_in_one_piece_sees() -> None:
    with shuffled().loader(epochs=3) as loader:
        whole = [(epoch, batch) for epoch in range(3) for batch in loader]
    seen: list[Any] = []
    state = None
    while len(seen) < len(whole):
        with shuffled().loader(epochs=3) as loader:
            if state is not None:
                loader.load_state_dict(state)
            piece = ((loader.epoch, batch) for _ in range(loader.epoch, 3) for batch in loader)
            for step, each in enumerate(piece, 1):
                seen.append(each)
                state = json.loads(json.dumps(loader.state_dict()))
                if step == 4:
                    break
    assert seen == whole


def test_what_was_delivered_before_a_ctrl_c_in_a_stage_is_not_delivered_again() -> None:
    whole = list(shuffled(60).loader())
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for steps in range(0, len(whole), 4):
            got = []
            with shuffled(60).loader() as loader:
                with pytest.raises(KeyboardInterrupt):
                    for batch in loader:
                        got.append(batch)
                        if len(got) > steps:
                            signal.raise_signal(signal.SIGINT)
                state = loader.state_dict()
            with shuffled(60).loader() as loader:
                loader.load_state_dict(state)
                assert got + list(loader) == whole
    finally:
        signal.signal(signal.SIGINT, previous)


def test_the_global_random_generators_are_left_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    list(shuffled().loader())
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_that_no_order_takes_is_refused_where_it_is_given(seed: int) -> None:
    with pytest.raises(pg.errors.GraphError, match=r"seed must be an int in 0\.\.2\*\*64-1"):
        pg.Graph("seed", seed=seed)


@pytest.mark.parametrize("options", [{"size": 2, "collate": 3}, {"cost": 3, "limit": 4}])
def test_what_batch_is_to_call_must_be_callable(options: dict[str, Any]) -> None:
    with pytest.raises(pg.errors.GraphError, match="must be a function of .*, got 3"):
        ops.Batch(**options)


def test_two_thousand_epochs_of_one_item() -> None:
    graph = pg.Graph("tiny")
    graph.add(ops.FromSequence([7])).then(abs, workers=2)
    with graph.loader(epochs=2_000) as loader:
        assert sum(item for _ in range(2_000) for item in loader) == 14_000
        assert loader.epoch == 2_000


class Several:
    """A dataset that also reads several items at once, as Hugging Face's do."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [Several.__getitem__(self, index) for index in indices]


class Overriding(Several):
    def __getitem__(self, index: int) -> int:
        return super().__getitem__(index) * 100


class Wrapping:
    """Changes the items of another dataset, and leaves everything else to it."""

    def __init__(self, inner: Several) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> int:
        return self.inner[index] * 100

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
@pytest.mark.parametrize(
    "dataset",
    [
        Overriding(),
        Wrapping(Several()),
        data.Subset(Wrapping(Several()), range(4)),  # type: ignore[arg-type]
    ],
    ids=["subclass", "wrapper", "subset of a wrapper"],
)
def test_several_items_are_not_asked_of_whom_a_dataset_inherits_or_wraps(dataset: Any, backend: Any) -> None:
    graph = pg.Graph("wrapped")
    graph.add(ops.FromSequence(dataset), backend=backend)
    with graph.loader() as loader:
        assert list(loader) == [0, 100, 200, 300]


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


def test_the_workers_of_a_dataloader_get_the_modes_back_that_torchs_have() -> None:
    with torch.no_grad(), MODES["autocast"](), MODES["device"]():
        there = modes()
        torch_modes.leave()
        assert modes() == PLAIN
        torch_modes.back()
        assert modes() == there
