"""The types of a batch follow from the types of its samples, never from their values."""

from __future__ import annotations

import itertools
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError
from pipegraph.operators.collate import collate


def kind(batch: Any) -> Any:
    """What a batch is, down to the dtypes and dimensions, without its sizes."""
    if isinstance(batch, torch.Tensor):
        return (str(batch.dtype), batch.dim())
    if isinstance(batch, dict):
        return {name: kind(value) for name, value in batch.items()}
    return tuple(map(kind, batch)) if isinstance(batch, tuple) else type(batch)


def batches(items: Any, size: int = 2, **options: Any) -> list[Any]:
    graph = pg.Graph("types")
    graph.add(ops.FromIterable(items)).then(ops.Batch(size, **options))
    with graph.loader() as loader:
        return list(loader)


COLUMNS: dict[str, list[Any]] = {
    "lists of numbers": [[1, 2], [3, 4], [5], [6, 7, 8], [], []],
    "lists of texts": [["a", "b"], ["c", "d"], ["e"], [], [], []],
    "lists of arrays": [[np.ones(2)] * 2, [np.ones(2)] * 2, [], [np.ones(3)], [], []],
    "lists of dicts": [[{"a": 1}], [{"a": 2}], [], [{"b": 2}], [], []],
    "texts": ["a", "b", "", "", "1", "2"],
    "objects": [Decimal(1), Decimal(2), Fraction(1), Fraction(2), Decimal(1), Fraction(2)],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_every_batch_of_a_column_has_one_type(name: str) -> None:
    kinds = [kind(batch) for batch in batches([{"f": value} for value in COLUMNS[name]])]
    assert kinds == [{"f": list}] * 3


@pytest.mark.parametrize("values", [[1, None], [None, 1], [None, None], ["a", None], [torch.ones(1), None]])
def test_a_null_is_refused_wherever_it_stands(values: list[Any]) -> None:
    with pytest.raises(pg.errors.DataError, match=r"field 'f'.*None.*Map before Batch.*collate=list"):
        batches([{"f": value} for value in values])


NUMBERS: dict[str, tuple[list[Any], torch.dtype]] = {
    "int and float": ([1, 2.5], torch.float64),
    "bool and int": ([True, 2], torch.int64),
    "int and float32": ([1, np.float32(2)], torch.float32),
    "float and complex": ([1.0, 2j], torch.complex128),
    "float16 and float32": ([np.float16(1), np.float32(2)], torch.float32),
    "number and tensor": ([1.5, torch.tensor(2.0)], torch.float64),
    "arrays": ([np.ones(2, np.float32), np.ones(2, np.int64)], torch.float32),
    "array and tensor": ([np.ones(2, np.float32), torch.ones(2, dtype=torch.float64)], torch.float64),
    "bfloat16": ([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)], torch.float32),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("pad", [None, 0])
def test_numbers_of_several_types_are_promoted_alike_in_any_order(name: str, pad: Any) -> None:
    values, dtype = NUMBERS[name]
    for order in itertools.permutations(values):
        assert collate(order, pad).dtype == dtype


# -- padding -----------------------------------------------------------------------------------------


def tokens(text: str) -> dict[str, list[int]]:
    """What a tokeniser returns."""
    ids = [ord(letter) for letter in text]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


@pytest.mark.parametrize("texts", [["ab", "c"], ["ab", "cd"], ["", "a"], ["", ""]])
def test_lists_of_tokens_are_padded_to_tensors_whatever_their_lengths(texts: list[str]) -> None:
    (batch,) = batches([tokens(text) for text in texts], pad=0)
    width = max(map(len, texts))
    for name in ("input_ids", "attention_mask"):
        assert batch[name].dtype == torch.int64 and batch[name].shape == (2, width)
        rows = [tokens(text)[name] for text in texts]
        assert batch[name].tolist() == [row + [0] * (width - len(row)) for row in rows]


def test_a_value_per_field_pads_these_and_leaves_other_lists() -> None:
    items = [{"ids": [1], "mask": [1], "words": ["a"]}, {"ids": [2, 3], "mask": [1, 1], "words": []}]
    (batch,) = batches(items, pad={"ids": 9, "mask": 0})
    assert batch["ids"].tolist() == [[1, 9], [2, 3]] and batch["mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["words"] == [["a"], []]


def test_a_field_is_made_by_its_own_function_and_the_others_are_padded() -> None:
    items = [{"ids": [1] * n, "boxes": {"xyxy": np.zeros((n, 4))}, "tag": n} for n in (1, 2)]
    found = batches(items, collate={"boxes.xyxy": list, "tag": max}, pad=0)[0]
    assert found["ids"].tolist() == [[1, 0], [1, 1]] and found["tag"] == 2
    assert [each.shape for each in found["boxes"]["xyxy"]] == [(1, 4), (2, 4)]
    one = batches(items, collate={"boxes.xyxy": list}, pad={"ids": 7})[0]
    assert one["ids"].tolist() == [[1, 7], [1, 1]] and one["tag"].tolist() == [1, 2]
    with pytest.raises(pg.errors.GraphError, match="Batch: give pad or collate, not both"):
        ops.Batch(2, collate={"ids": list}, pad={"ids": 0})
    with pytest.raises(pg.errors.GraphError, match="Batch: collate of 'ids' must be"):
        ops.Batch(2, collate={"ids": 0})


@pytest.mark.parametrize(
    ("dtype", "pad"), [("uint8", -1), ("uint8", 300), ("int64", 0.5), ("int64", float("nan")), ("bool", 2)]
)
@pytest.mark.parametrize("to", [None, 4])
def test_a_padding_that_the_dtype_cannot_hold_is_refused_and_not_changed(
    dtype: str, pad: Any, to: Any
) -> None:
    items = [{"x": np.ones(n, dtype)} for n in (1, 2)]
    with pytest.raises(DataError, match=f"field 'x': pad=.* does not fit {dtype}, the dtype of the values"):
        batches(items, pad={"x": ops.Pad(pad, to=to)})


def test_arrays_are_padded_wherever_they_lie():
    whole = np.arange(12, dtype=np.int32).reshape(3, 4)
    backwards, column = whole[0, ::-1], whole[:, 1]
    column.flags.writeable = False
    (batch,) = batches([{"ids": row} for row in (backwards, column)], pad=-1)
    assert batch["ids"].dtype == torch.int32
    assert batch["ids"].tolist() == [[3, 2, 1, 0], [1, 5, 9, -1]]
