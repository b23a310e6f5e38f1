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


def test_lists_within_samples_are_kept_one_per_sample() -> None:
    assert batches([{"f": [1, 2]}, {"f": [3, 4]}]) == [{"f": [[1, 2], [3, 4]]}]
    assert batches([{"f": [1, 2]}, {"f": [3]}]) == [{"f": [[1, 2], [3]]}]


@pytest.mark.parametrize("values", [[1, None], [None, 1], [None, None], ["a", None], [torch.ones(1), None]])
def test_a_null_is_refused_wherever_it_stands(values: list[Any]) -> None:
    with pytest.raises(pg.errors.DataError, match=r"field 'f'.*None.*Map before Batch.*collate=list"):
        batches([{"f": value} for value in values])


def test_a_collate_of_ones_own_gets_the_nulls() -> None:
    assert batches([1, None], collate=list) == [[1, None]]


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


def test_padding_ragged_arrays_of_several_dtypes_loses_nothing() -> None:
    batch = collate([np.array([1, 2]), np.array([0.5])], 0)
    assert batch.tolist() == [[1.0, 2.0], [0.5, 0.0]]


TWO_KINDS = [1, "a", Decimal(1), (1,), [1], {"a": 1}, np.ones(2), np.array(["a"])]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(range(len(TWO_KINDS)), 2)))
def test_two_kinds_in_one_column_are_refused_in_any_order(first: int, second: int) -> None:
    with pytest.raises(pg.errors.DataError, match=r"field 'f'.*do not make one batch|cannot be stacked"):
        batches([{"f": TWO_KINDS[first]}, {"f": TWO_KINDS[second]}])


def test_tuples_are_collated_place_by_place_and_must_be_of_one_length() -> None:
    assert kind(batches([(1, "a"), (2, "b")])[0]) == (("torch.int64", 1), list)
    with pytest.raises(pg.errors.DataError, match=r"tuples of 2 and 1 entries.*a list"):
        batches([(1, 2), (1,)])


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


def test_bare_lists_and_lists_of_lists_are_padded() -> None:
    assert batches([[1], [2, 3]], pad=0)[0].tolist() == [[1, 0], [2, 3]]
    nested = batches([[[1, 2], [3]], [[4]]], pad=0)[0]
    assert nested.tolist() == [[[1, 2], [3, 0]], [[4, 0], [0, 0]]]
    assert batches([[], [[1, 2]]], pad=0)[0].tolist() == [[[0, 0]], [[1, 2]]]
    arrays = batches([[np.ones(2)], [np.ones(1), np.ones(1)]], pad=0)[0]
    assert arrays.tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]


def test_empty_lists_count_as_the_padding_does() -> None:
    items = [[0.5], [], [], []]
    assert [batch.dtype for batch in batches(items, pad=0.0)] == [torch.float64] * 2
    assert [batch.dtype for batch in batches([[1], [2], [], []], pad=0.0)] == [torch.float64] * 2
    assert batches(items, pad=0.0)[1].shape == (2, 0)


def test_padding_a_list_of_something_else_is_refused_with_the_way_out() -> None:
    with pytest.raises(pg.errors.DataError, match=r"field 'w'.*str.*pad=\{'field': 0\}"):
        batches([{"w": ["a"], "n": [1]}, {"w": [], "n": [2]}], pad=0)


@pytest.mark.parametrize("parts", [2, 3])
def test_rows_that_travelled_in_bundles_give_the_same_types(parts: int) -> None:
    items = [1, 2, 3.5, 4.5, True, False, 7, 8.5]
    graph = pg.Graph("types")
    graph.add(ops.FromSequence(items)).then(lambda x: x, workers=2).then(ops.Batch(parts))
    with graph.loader() as loader:
        assert [batch.dtype for batch in loader] == [
            collate(items[at : at + parts]).dtype for at in range(0, len(items), parts)
        ]


def test_masked_arrays_keep_their_masks():
    items = [np.ma.array([1, 2], mask=[False, True]), np.ma.array([3, 4], mask=[False, False])]
    made = collate(items)
    assert isinstance(made, list) and made[0].mask.tolist() == [False, True]
    with pytest.raises(DataError, match="do not make one batch"):
        collate([items[0], np.array([1, 2])])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says it of each sparse tensor
def test_sparse_tensors_make_batches_however_they_come():
    items = [torch.sparse_coo_tensor([[n % 3]], [1.0 + n], (3,), check_invariants=False) for n in range(12)]
    graph = pg.Graph("g")
    graph.add(ops.FromSequence([{"x": item} for item in items])).then(ops.Batch(3))
    with graph.loader() as loader:
        found = [batch["x"].to_dense() for batch in loader]
    assert torch.equal(torch.cat(found), torch.stack([item.to_dense() for item in items]))


@pytest.mark.parametrize("pad", ["x", [0], {"ids": "x"}, {"ids": None}])
def test_a_padding_that_is_no_number_is_refused_where_it_is_given(pad: Any) -> None:
    with pytest.raises(pg.errors.GraphError, match="Batch: pad must be a number, an ops.Pad, or a mapping"):
        ops.Batch(2, pad=pad)


def test_a_padding_is_for_batches_that_batch_makes() -> None:
    with pytest.raises(pg.errors.GraphError, match="Batch: give pad or collate, not both"):
        ops.Batch(2, pad=0, collate=list)


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


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_what_its_own_function_makes_does_not_depend_on_shapes_that_are_equal(backend: str) -> None:
    graph = pg.Graph("g")
    rows = graph.add(ops.FromSequence([{"x": np.arange(3.0), "y": i} for i in range(4)]))
    rows.then(lambda row: row, backend=backend).then(ops.Batch(2, collate={"x": list}))
    with graph.loader() as loader:
        assert [type(batch["x"]) for batch in loader] == [list, list]


def test_mask_and_lengths_need_two_names() -> None:
    with pytest.raises(pg.errors.GraphError, match="need two names, got 'm' for both"):
        ops.Pad(mask="m", lengths="m")


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


@pytest.mark.parametrize("pad", [None, 0])
def test_arrays_of_several_dimensions_are_not_sent_to_pad(pad):
    with pytest.raises(
        DataError, match=r"shapes \(\) and \(1,\) cannot be stacked; .*; pad needs as many dimensions"
    ):
        collate([torch.zeros(()), torch.zeros(1)], pad)


def test_a_pad_for_all_fields_leaves_those_that_cannot_be_padded() -> None:
    (batch,) = batches(
        [{"ids": [1], "text": "a", "k": 2}, {"ids": [1, 2], "text": "b", "k": 3}], pad=ops.Pad(mask=True)
    )
    assert sorted(batch) == ["ids", "ids_mask", "k", "text"]


def test_samples_that_are_lists_become_columns_as_tuples_do() -> None:
    def batches(samples, **options):
        graph = pg.Graph("lists")
        graph.add(ops.FromSequence(samples)).then(ops.Batch(2, **options))
        with graph.loader() as loader:
            return list(loader)

    ((x, y),) = batches([[torch.zeros(3), 1], [torch.ones(3), 2]])
    assert x.shape == (2, 3)
    assert y.tolist() == [1, 2]
    ((texts, labels),) = batches([["a", 0], ["b", 1]])
    assert (texts, labels.tolist()) == (["a", "b"], [0, 1])
    assert batches([[1, 2], [3]], pad=0)[0].tolist() == [[1, 2], [3, 0]]
    assert batches([[1, 2], [3]], collate=list) == [[[1, 2], [3]]]
    with pytest.raises(DataError, match="lists of 2 and 1 entries.*pad=0"):
        batches([[1, 2], [3]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"pad": {"idz": 0}},
            "pad names the field 'idz', which the samples do not have; they have 'ids', 'm'",
        ),
        ({"collate": {"idz": list}}, "collate names the field 'idz'"),
        ({"pad": {"ids": ops.Pad(0, mask="m")}}, "field 'm': there is such a field already"),
    ],
)
def test_a_rule_for_no_field_and_an_added_field_of_a_taken_name_are_errors(options, said):
    graph = pg.Graph("named")
    graph.add(ops.FromSequence([{"ids": [1, 2], "m": 1}, {"ids": [3, 4], "m": 2}])).then(
        ops.Batch(2, **options)
    )
    with graph.loader() as loader, pytest.raises(pg.PipegraphError, match=said):
        list(loader)


def test_a_batch_by_cost_has_no_full_one_to_drop_the_last_for():
    with pytest.raises(pg.PipegraphError, match="drop_last=True needs size"):
        ops.Batch(cost=len, limit=9, drop_last=True)
