"""Samplers of all kinds in a ``pg.DataLoader``: the same batches as torch's, also after a resume."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["batch_sampler", "sampler"])
def test_a_sampler_that_rewinds_and_returns_itself_gives_each_index_once(whole: bool, place: Any) -> None:
    def options() -> dict[str, Any]:
        if whole:
            return {"batch_sampler": Rewinds([[4, 5], [2, 3], [0, 1]])}
        return {"sampler": Rewinds([5, 3, 4]), "batch_size": None}

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


class Shuffles(data.BatchSampler):
    """Draws whole batches in an order from torch's global generator, as torchnlp's bucket sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])


INNER: dict[str, Any] = {
    "own generator": lambda: data.RandomSampler(range(24), generator=torch.Generator().manual_seed(4)),
    "list": lambda: [*range(24)],
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


class Kept(pg.DataLoader[Any]):
    """As ultralytics', timm's and yolov5's: one iterator, made with the loader."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.parametrize("place", [*PLACES, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("done", [0, 3])
def test_an_iterator_that_has_delivered_nothing_begins_at_a_state_that_is_loaded(
    done: int, place: Any
) -> None:
    def made(kind: Any, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return kind(list(range(12)), 2, shuffle=True, generator=generator, **place)

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
