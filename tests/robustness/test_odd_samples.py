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


@dataclasses.dataclass
class Checked:
    x: Any
    twice: Any = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if not isinstance(self.x, int):
            raise TypeError("a sample's x is an int")
        self.twice = 2 * self.x


def test_frozen_dataclasses_with_slots_are_stacked_field_by_field() -> None:
    (batch,) = batches([Frozen(np.float32(1)), Frozen(np.float32(2))])
    assert type(batch) is Frozen and batch.x.tolist() == [1, 2]


def test_dataclasses_survive_batch_and_unbatch() -> None:
    graph = pg.Graph("round trip")
    graph.add(ops.FromIterable([Checked(1), Checked(2), Checked(3)])).then(ops.Batch(2)).then(ops.Unbatch())
    with graph.loader() as loader:
        assert [(int(item.x), int(item.twice)) for item in loader] == [(1, 2), (2, 4), (3, 6)]


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


def test_arrays_of_foreign_byte_order_are_stacked() -> None:
    (batch,) = batches([np.arange(3, dtype=">i4")] * 2)
    assert batch.tolist() == [[0, 1, 2]] * 2


def test_zero_dimensional_arrays_and_tensors_make_a_vector() -> None:
    assert batches([np.array(3.5), np.array(1.5)])[0].tolist() == [3.5, 1.5]
    assert batches([torch.tensor(3), torch.tensor(4)])[0].tolist() == [3, 4]


def test_empty_tensors_keep_their_shape() -> None:
    assert batches([torch.empty(0, 3)] * 2)[0].shape == (2, 0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint16])
def test_tensors_of_rare_dtypes_keep_them(dtype: torch.dtype) -> None:
    assert batches([torch.ones(2, dtype=dtype)] * 2)[0].dtype == dtype
