"""Samplers of all kinds in a ``pg.DataLoader``: the same batches as torch's, also after a resume."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import data

import pipegraph as pg

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PLACES = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "workers": "thread"}]


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


class Rewinds:
    """Its own iterator, which ``iter`` rewinds, as lhotse's samplers are."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        self.n = 0
        return self

    def __next__(self) -> Any:
        if self.n == len(self.items):
            raise StopIteration
        self.n += 1
        return self.items[self.n - 1]


class RewindsWithState(Rewinds):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", [Rewinds, RewindsWithState])
@pytest.mark.parametrize("whole", [True, False], ids=["batch_sampler", "sampler"])
def test_a_sampler_that_rewinds_and_returns_itself_gives_each_index_once(
    whole: bool, kind: Any, place: Any
) -> None:
    def options() -> dict[str, Any]:
        if whole:
            return {"batch_sampler": kind([[4, 5], [2, 3], [0, 1]])}
        return {"sampler": kind([5, 3, 4]), "batch_size": None}

    theirs = lists(data.DataLoader(range(6), **options()))
    loader = pg.DataLoader(range(6), **options(), **place)
    assert [lists(loader) for _ in range(2)] == [theirs, theirs]
    passing = iter(loader)
    next(passing), next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    assert lists(passing) == theirs[2:]
    again = pg.DataLoader(range(6), **options(), **place)
    again.load_state_dict(state)
    assert lists(again) == theirs[2:]
    assert lists(again) == theirs


class RewindingStream(data.IterableDataset[int]):
    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(Rewinds(self.items))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_rewinds_resumes_behind_what_was_delivered(workers: int) -> None:
    loader = pg.DataLoader(RewindingStream([*range(7)]), 2, num_workers=workers)
    passing = iter(loader)
    assert next(passing).tolist() == [0, 1]
    state = loader.state_dict()
    again = pg.DataLoader(RewindingStream([*range(7)]), 2, num_workers=workers)
    again.load_state_dict(state)
    assert lists(again) == lists(passing) == [[2, 3], [4, 5], [6]]


class Shuffles(data.BatchSampler):
    """Draws whole batches in an order from torch's global generator, as torchnlp's bucket sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])


class Ending(data.SequentialSampler):
    """Its state is of the end of the epoch before: it first finishes that one."""

    at = 0
    begins = 0

    def __iter__(self) -> Iterator[int]:
        start, self.begins = self.begins, 0
        for index in range(start, len(self)):
            self.at = index + 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


INNER: dict[str, Any] = {
    "in sequence": lambda: data.SequentialSampler(range(24)),
    "own generator": lambda: data.RandomSampler(range(24), generator=torch.Generator().manual_seed(4)),
    "list": lambda: [*range(24)],
    "own state": lambda: Ending(range(24)),
}


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_batch_sampler_that_shuffles_around_a_sampler_resumes_in_its_order(
    epochs: int, inner: str, place: Any
) -> None:
    def made(seed: int) -> pg.DataLoader:
        torch.manual_seed(seed)
        return pg.DataLoader(range(24), batch_sampler=Shuffles(INNER[inner](), 2, False), **place)

    loader = made(0)
    for _ in range(epochs):
        lists(loader)
    passing = iter(loader)
    came = [next(passing).tolist() for _ in range(5)]
    state = json.loads(json.dumps(loader.state_dict()))
    rest = lists(passing)
    assert sorted(index for batch in came + rest for index in batch) == [*range(24)]
    again = made(7)
    again.load_state_dict(state)
    assert lists(again) == rest


@pytest.mark.parametrize("inner", INNER)
def test_a_state_between_epochs_has_the_order_of_a_batch_sampler_that_shuffles(inner: str) -> None:
    def made(seed: int) -> pg.DataLoader:
        torch.manual_seed(seed)
        return pg.DataLoader(range(24), batch_sampler=Shuffles(INNER[inner](), 2, False))

    loader = made(0)
    lists(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    following = [lists(loader) for _ in range(2)]
    again = made(7)
    again.load_state_dict(state)
    assert [lists(again) for _ in range(2)] == following


@pytest.mark.parametrize(
    "sampler",
    [
        data.BatchSampler(data.SequentialSampler(range(6)), 2, False),
        data.BatchSampler(data.RandomSampler(range(6), generator=torch.Generator()), 2, False),
        data.DistributedSampler(range(6), 2, 0),
    ],
    ids=["in sequence", "generator", "distributed"],
)
def test_torch_s_own_samplers_with_a_generator_or_none_leave_the_global_one(sampler: Any) -> None:
    whole = not isinstance(sampler, data.DistributedSampler)
    loader = pg.DataLoader(range(6), **{"batch_sampler" if whole else "sampler": sampler})
    next(iter(loader))
    (part,) = loader.state_dict()["rank0"]
    assert "global" not in part["order"]


class Noisy(data.Dataset[Any]):
    """Its state is that of torch's global generator, as that of the dataset in torchdata's own tests."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))

    def state_dict(self) -> Any:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: Any) -> None:
        torch.set_rng_state(state["generator"])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_a_dataset_with_the_global_generator_as_its_state_repeats_no_epoch(
    epochs: int, shuffle: bool
) -> None:
    def made(seed: int) -> pg.DataLoader:
        torch.manual_seed(seed)
        return pg.DataLoader(Noisy(), 2, shuffle, collate_fn=list)

    loader = made(0)
    came = [lists(loader) for _ in range(epochs)]
    state = loader.state_dict()
    following = [lists(loader) for _ in range(3)]
    again = made(7)
    again.load_state_dict(state)
    resumed = [lists(again) for _ in range(3)]
    assert resumed == following
    assert len({str(epoch) for epoch in came + resumed}) == epochs + 3


class UnknownLength(data.BatchSampler):
    """As PyG's ``DynamicBatchSampler``."""

    def __len__(self) -> int:
        raise ValueError("the length is not known")


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_batch_sampler_that_does_not_say_its_length_is_read_to_its_end(place: Any) -> None:
    sampler = UnknownLength(data.SequentialSampler(range(6)), 2, False)
    loader = pg.DataLoader(range(6), batch_sampler=sampler, **place)
    assert lists(loader) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="not known"):
        len(loader)


class Kept(pg.DataLoader[Any]):
    """As ultralytics', timm's and yolov5's: one iterator, made with the loader."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Inherits(list[int]):
    """Cannot be sent to a worker."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.lock = torch.multiprocessing.Lock()


KEPT = [*PLACES, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize(
    ("place", "rows"), [*[(place, list) for place in KEPT], (KEPT[1], Inherits)], ids=str
)
@pytest.mark.parametrize("done", [0, 3])
def test_an_iterator_that_has_delivered_nothing_begins_at_a_state_that_is_loaded(
    done: int, place: Any, rows: Any
) -> None:
    def made(kind: Any, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return kind(rows(range(12)), 2, shuffle=True, generator=generator, **place)

    loader = made(pg.DataLoader, 1)
    passing = iter(loader)
    for _ in range(done):
        next(passing)
    state = loader.state_dict()
    rest = lists(passing)
    kept = made(Kept, 2)
    kept.load_state_dict(state)
    following = iter(kept)
    assert next(following).tolist() == rest[0]
    behind = kept.state_dict()
    assert [next(kept.iterator).tolist() for _ in rest[1:]] == rest[1:]
    again = made(pg.DataLoader, 3)
    again.load_state_dict(behind)
    assert lists(again) == rest[1:]


@pytest.mark.parametrize("place", PLACES[:2], ids=str)
def test_an_iterator_that_goes_on_past_a_state_that_is_loaded_is_named(place: Any) -> None:
    loader = pg.DataLoader(range(6), 2, **place)
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    next(passing)
    loader.load_state_dict(state)
    with pytest.warns(pg.errors.PipegraphWarning, match=r"call iter\(\) again"):
        assert next(passing).tolist() == [4, 5]
    assert lists(loader) == [[2, 3], [4, 5]]


def test_an_iterator_that_is_kept_beside_the_next_one_gives_it_the_state() -> None:
    loader = pg.DataLoader(range(6), 2)
    begun = iter(loader)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert lists(loader) == [[0, 1], [2, 3], [4, 5]]
    assert lists(begun) == [[0, 1], [2, 3], [4, 5]]


def test_a_loader_that_has_loaded_a_state_can_be_pickled() -> None:
    loader = pg.DataLoader(range(6), 2)
    passing = iter(loader)
    next(passing)
    loader.load_state_dict(loader.state_dict())
    assert lists(pickle.loads(pickle.dumps(loader))) == [[2, 3], [4, 5]]


class Reduced:
    def __init__(self) -> None:
        self.factor = 2

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * self.factor

    def __getstate__(self) -> dict[str, int]:
        return {"factor": 3}


def test_worker_processes_see_what_getstate_gives() -> None:
    assert lists(pg.DataLoader(Reduced(), None)) == [0, 2, 4]
    assert lists(pg.DataLoader(Reduced(), None, num_workers=1)) == [0, 3, 6]
