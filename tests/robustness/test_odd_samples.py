"""Samples of kinds that nobody planned for: what ``Batch`` makes of them, and how it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


def batches(items: Any, size: int = 2, **options: Any) -> list[Any]:
    graph = pg.Graph("odd")
    graph.add(ops.FromIterable(items)).then(ops.Batch(size, **options))
    with graph.loader() as loader:
        return list(loader)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


def test_frozen_dataclasses_with_slots_are_stacked_field_by_field() -> None:
    (batch,) = batches([Frozen(np.float32(1)), Frozen(np.float32(2))])
    assert type(batch) is Frozen and batch.x.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (torch.ones(2), None, "Tensor of torch.float32 in sample 0 and NoneType in sample 1"),
        (np.ones(2), None, "ndarray of float64 in sample 0 and NoneType in sample 1"),
        (np.float32(1), "a", "float32 in sample 0 and str in sample 1"),
        ({"a": 1}, 3, "dict in sample 0 and int in sample 1"),
        ((1, 2), 3, "tuple in sample 0 and int in sample 1"),
        (Pair(1, 2), None, "Pair in sample 0 and NoneType in sample 1"),
        (Frozen(1), None, "Frozen in sample 0 and NoneType in sample 1"),
    ],
)
def test_samples_of_two_kinds_are_refused_by_field_and_kind(first: Any, second: Any, names: str) -> None:
    with pytest.raises(pg.errors.DataError, match="field 'f'.*" + names) as caught:
        batches([{"f": first}, {"f": second}])
    assert "stage 'batch'" in caught.value.__notes__[0]
