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

    theirs = lists(data.DataLoader(range(6), **options()))  # type: ignore[arg-type]
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
