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
