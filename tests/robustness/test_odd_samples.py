"""Samples of kinds that nobody planned for: what ``Batch`` makes of them, and how it refuses."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from fractions import Fraction
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


def read_only(n: int) -> np.ndarray[Any, Any]:
    array = np.arange(float(n))
    array.flags.writeable = False
    return array


def test_frozen_dataclasses_with_slots_are_stacked_field_by_field() -> None:
    (batch,) = batches([Frozen(np.float32(1)), Frozen(np.float32(2))])
    assert type(batch) is Frozen and batch.x.tolist() == [1, 2]


def test_a_dataclass_with_a_check_and_a_field_that_init_does_not_take_travels_and_is_stacked() -> None:
    (batch,) = batches([Checked(1), Checked(2)])
    assert batch.x.tolist() == [1, 2] and batch.twice.tolist() == [2, 4]


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


@pytest.mark.parametrize("value", [np.ones(2, np.longdouble), 2**70])
def test_values_that_torch_has_no_dtype_for_are_refused_by_field(value: Any) -> None:
    with pytest.raises(pg.errors.DataError, match="field 'f'.*cannot be made a tensor"):
        batches([{"f": value}, {"f": value}])


def test_numbers_that_torch_does_not_know_become_lists() -> None:
    assert batches([Fraction(1, 2), Fraction(1)]) == [[Fraction(1, 2), Fraction(1)]]


def test_read_only_arrays_are_padded_without_a_warning() -> None:
    (batch,) = batches([read_only(2), read_only(3)], pad=-1)
    assert batch.tolist() == [[0, 1, -1], [0, 1, 2]]


def test_arrays_of_foreign_byte_order_and_backward_strides_are_padded() -> None:
    (batch,) = batches([np.arange(3, dtype=">i4"), np.arange(2, dtype=">i4")[::-1]], pad=0)
    assert batch.dtype == torch.int32 and batch.tolist() == [[0, 1, 2], [1, 0, 0]]


def test_arrays_of_foreign_byte_order_are_stacked() -> None:
    (batch,) = batches([np.arange(3, dtype=">i4")] * 2)
    assert batch.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("place", [{}, {"backend": "inline"}, {"backend": "process"}])
def test_gathered_windows_of_tokens_of_foreign_byte_order_are_batches(place: Any, size: int) -> None:
    graph = pg.Graph("tokens")
    graph.add(ops.FromTokens(np.arange(100, dtype=">u2"), 4), **place).then(ops.Batch(size))
    with graph.loader() as loader:
        found = list(loader)
    assert {batch["tokens"].dtype for batch in found} == {torch.int64}
    assert [row for batch in found for row in batch["tokens"].tolist()] == np.arange(100).reshape(
        25, 4
    ).tolist()


def test_quantised_tensors_that_come_in_bundles_are_stacked(programs: Any) -> None:
    """In a program of its own, which a view of such memory can end."""
    done = programs.run(
        """
import torch
import pipegraph as pg
from pipegraph import operators as ops


def quantised(i):
    return torch.quantize_per_tensor(torch.ones(2) * i, 1.0, 0, torch.quint8)


if __name__ == "__main__":
    for place in ({}, {"backend": "inline"}, {"backend": "process", "workers": 2}):
        for size in (7, 30):
            graph = pg.Graph("quantised")
            graph.add(ops.FromSequence(range(60))).then(quantised, **place).then(ops.Batch(size))
            with graph.loader() as loader:
                found = list(loader)
            assert all(batch.is_quantized and batch.shape[1:] == (2,) for batch in found)
            assert torch.cat([batch.dequantize()[:, 0] for batch in found]).tolist() == list(range(60))
    print("all")
"""
    )
    assert done.stdout.strip() == "all", done.stderr


def test_zero_dimensional_arrays_and_tensors_make_a_vector() -> None:
    assert batches([np.array(3.5), np.array(1.5)])[0].tolist() == [3.5, 1.5]
    assert batches([torch.tensor(3), torch.tensor(4)])[0].tolist() == [3, 4]


def test_empty_tensors_keep_their_shape() -> None:
    assert batches([torch.empty(0, 3)] * 2)[0].shape == (2, 0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint16])
def test_tensors_of_rare_dtypes_keep_them(dtype: torch.dtype) -> None:
    assert batches([torch.ones(2, dtype=dtype)] * 2)[0].dtype == dtype


def test_sparse_tensors_travel_and_are_stacked() -> None:
    (batch,) = batches([torch.eye(2).to_sparse()] * 2)
    assert batch.is_sparse and batch.to_dense().tolist() == torch.eye(2).expand(2, 2, 2).tolist()


def test_enumerations_and_other_objects_become_lists_and_int_enumerations_numbers() -> None:
    class Colour(enum.Enum):
        RED = 1

    class Level(enum.IntEnum):
        LOW = 1

    colours, levels, queues = batches([(Colour.RED, Level.LOW, collections.deque([1]))] * 2)[0]
    assert colours == [Colour.RED] * 2 and levels.tolist() == [1, 1] and len(queues) == 2


def test_lists_of_texts_as_long_as_the_batch_come_apart_as_they_were() -> None:
    items = [{"x": [f"a{i}", f"b{i}"]} for i in range(4)]
    graph = pg.Graph("texts")
    graph.add(ops.FromIterable(items)).then(ops.Batch(2)).then(ops.Unbatch())
    with graph.loader() as loader:
        assert list(loader) == items


def test_a_class_is_called_to_make_its_iterator_anew_for_each_epoch() -> None:
    graph = pg.Graph("class")
    graph.add(ops.FromIterable(itertools.count)).then(ops.Batch(3))
    with graph.loader(epochs=2) as loader:
        firsts = [next(iter(loader)).tolist() for _ in range(2)]
    assert firsts == [[0, 1, 2]] * 2


def test_an_enumeration_class_is_iterated_and_not_called() -> None:
    class Colour(enum.Enum):
        RED = 1
        BLUE = 2

    graph = pg.Graph("enum")
    graph.add(ops.FromIterable(Colour))
    with graph.loader() as loader:
        assert list(loader) == [Colour.RED, Colour.BLUE]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_of_several_scales_are_refused_as_torch_would_change_their_values() -> None:
    one = torch.quantize_per_tensor(torch.ones(2), 10.0, 0, torch.quint8)
    other = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
    with pytest.raises(pg.errors.DataError, match="field 'q': quantised tensors of several scales"):
        batches([{"q": one}, {"q": other}])
    channels = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8)
    with pytest.raises(pg.errors.DataError, match="dequantize"):
        batches([channels])


@pytest.mark.parametrize("lengths", [(2, 1), (2, 2)])
@pytest.mark.parametrize("to", [None, 4])
def test_tensors_that_require_gradients_are_padded_as_they_are_stacked(lengths: Any, to: Any) -> None:
    tensors = [torch.ones(n, requires_grad=True) for n in lengths]
    (batch,) = batches([{"x": each} for each in tensors], pad={"x": ops.Pad(0, to=to)})
    assert batch["x"].requires_grad and batch["x"].shape == (2, to or 2)
    batch["x"].sum().backward()
    assert [each.grad.tolist() for each in tensors if each.grad is not None] == [[1.0] * n for n in lengths]
