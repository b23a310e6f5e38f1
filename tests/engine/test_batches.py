"""Which parts of a batch have a row per sample: decided when it is made, by every operator in the same way."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.batches import resolved, select_rows
from pipegraph.chunk import Chunk
from pipegraph.contracts import Regroup
from pipegraph.replicas import Whole


def through(items: Any, *stages: Any) -> list[Any]:
    graph = pg.Graph("rows")
    node = graph.add(ops.FromIterable(items))
    for stage in stages:
        node = node.then(stage)
    with graph.loader() as loader:
        return list(loader)


def plain(data: Any) -> Any:
    """Arrays and tensors as lists, so that trees can be compared."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return data.tolist()
    if isinstance(data, dict):
        return {name: plain(value) for name, value in data.items()}
    return type(data)(map(plain, data)) if isinstance(data, list | tuple) else data


def same(batch: Any) -> Any:
    return batch


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    x: Any
    names: Any


def test_texts_that_a_map_splits_come_apart_as_they_were_put_together() -> None:
    words = through(["a b", "c d"] * 2, ops.Batch(2), lambda batch: [t.split() for t in batch], ops.Unbatch())
    assert words == [["a", "b"], ["c", "d"]] * 2


SAMPLES = {
    "tensors": [torch.tensor([1, 2]), torch.tensor([3, 4])],
    "texts": ["a", "b"],
    "numbers": [1, 2],
    "pairs": [(torch.tensor([1, 2]), "a"), (torch.tensor([3, 4]), "b")],
    "lists": [[1, 2], [3, 4]],
    "lists of tensors": [[torch.tensor([1, 2])] * 2, [torch.tensor([3, 4])] * 2],
    "dicts": [{"x": torch.tensor([1, 2]), "n": 1}, {"x": torch.tensor([3, 4]), "n": 2}],
}
KEEPING = {"list": list, "tuple": tuple, "itself": same, "a list of them": lambda items: [*items]}


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("collate", KEEPING)
def test_a_collate_that_keeps_the_samples_is_undone_by_unbatch(samples: str, collate: str) -> None:
    items = SAMPLES[samples] * 2
    for between in ([], [same], [lambda batch: type(batch)(batch)]):
        got = through(items, ops.Batch(2, collate=KEEPING[collate]), *between, ops.Unbatch())
        assert plain(got) == plain(items)


@pytest.mark.parametrize(
    "collate",
    [
        lambda items: tuple(zip(*items, strict=True)),
        lambda items: list(zip(*items, strict=True)),
        lambda items: [list(column) for column in zip(*items, strict=True)],
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns_of_the_samples_own_objects_are_rows_whatever_their_length(collate: Any, size: int) -> None:
    items = [(torch.full((3, 2), i), i, [i] * 3) for i in range(3)]
    got = through(items, ops.Batch(size, collate=collate), ops.Unbatch())
    assert plain([tuple(item) for item in got]) == plain(items)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_torchs_default_collate_makes_comes_apart(size: int) -> None:
    items = [(torch.full((2,), i), f"t{i}", [i, 10 * i], {"p": (i, f"u{i}")}) for i in range(6)]
    collate = torch.utils.data.default_collate
    got = through(items, ops.Batch(size, collate=collate), ops.Unbatch())
    assert [(plain(x), t, plain(ns), plain(d)) for x, t, ns, d in got] == [
        (x.tolist(), t, ns, {"p": [d["p"][0], d["p"][1]]}) for x, t, ns, d in items
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_a_wrapped_default_collate_makes_columns_at_the_top(size: int) -> None:
    items = [(torch.full((2,), i), i) for i in range(6)]
    stages = ops.Batch(size, collate=lambda samples: torch.utils.data.default_collate(samples))
    assert plain(through(items, stages, ops.Unbatch())) == [[[i, i], i] for i in range(6)]
    mapped = [ops.Batch(size, collate=list), torch.utils.data.default_collate, ops.Unbatch()]
    assert plain(through(items, *mapped)) == [[[i, i], i] for i in range(6)]


def test_fields_that_a_map_adds_are_read_by_their_type() -> None:
    def add(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            **batch,
            "twice": batch["x"] * 2,
            "array": np.arange(2),
            "names": ["a", "b"],
            "crops": [torch.zeros(2), torch.ones(2)],
            "size": (224, 226),
            "split": "ab",
            "scale": torch.tensor(2.0),
            "weights": Whole(torch.tensor([1.0, 3.0])),
            "nothing": None,
        }

    first, second = through([{"x": 1}, {"x": 2}], ops.Batch(2), add, ops.Unbatch())
    whole = {"size": (224, 226), "split": "ab", "scale": 2.0, "weights": [1.0, 3.0], "nothing": None}
    assert plain(first) == {"x": 1, "twice": 2, "array": 0, "names": "a", "crops": [0.0, 0.0], **whole}
    assert plain(second) == {"x": 2, "twice": 4, "array": 1, "names": "b", "crops": [1.0, 1.0], **whole}


@pytest.mark.parametrize(
    ("field", "found"),
    [
        (torch.zeros(3), "field 'd.f': 3 rows in a batch of 2 samples"),
        (np.zeros(3), "field 'd.f': 3 rows in a batch of 2 samples"),
        (["a", "b", "c"], "field 'd.f': 3 rows in a batch of 2 samples"),
        ({"g": [[1]]}, "field 'd.f.g': 1 rows in a batch of 2 samples"),
        ((torch.zeros(2), torch.zeros(1)), r"field 'd.f.1': 1 rows in a batch of 2 samples"),
    ],
)
def test_another_number_of_rows_is_an_error_that_names_the_field(field: Any, found: str) -> None:
    stages = [ops.Batch(2), lambda batch: {**batch, "d": {"f": field}}, ops.Unbatch()]
    with pytest.raises(pg.errors.DataError, match=found + r".*replicas\.Whole"):
        through([{"x": 1}, {"x": 2}], *stages)


def test_containers_keep_their_kind_in_both_ways() -> None:
    items = [Pair(i, collections.OrderedDict(r=Record(f"x{i}", [i]))) for i in range(4)]
    collate = lambda pairs: Pair(  # noqa: E731
        torch.tensor([p.left for p in pairs]),
        collections.OrderedDict(
            r=Record([p.right["r"].x for p in pairs], [p.right["r"].names for p in pairs])
        ),
    )
    got = through(items, ops.Batch(2, collate=collate), ops.Unbatch())
    assert [(type(item), int(item.left), item.right) for item in got] == [
        (Pair, item.left, item.right) for item in items
    ]
    assert all(type(item.right) is collections.OrderedDict for item in got)


BATCHES = {
    "default": ({"x": [1, 2], "t": "ab"}, None),
    "tuple": ((torch.zeros(3), "a"), tuple),
    "list": ({"a": torch.zeros(3)}, list),
    "columns": ((torch.arange(3), 4), lambda items: tuple(zip(*items, strict=True))),
    "torch": ((torch.arange(3), "a", [1, 2, 3]), torch.utils.data.default_collate),
}


@pytest.mark.parametrize("name", BATCHES)
def test_rows_are_selected_by_the_rule_of_unbatch(name: str) -> None:
    sample, collate = BATCHES[name]
    graph = pg.Graph("rows")
    graph.add(ops.FromIterable([sample] * 3)).then(ops.Batch(3, collate=collate))
    with graph.loader() as loader:
        (chunk,) = loader.chunks()
    left = chunk.select([0, 2], select_rows(chunk.data, [0, 2], 3, chunk.layout))
    first, _, last = ops.Unbatch().process(chunk)
    assert plain([part.data for part in ops.Unbatch().process(left)]) == plain([first.data, last.data])


@pytest.mark.parametrize("name", BATCHES)
def test_scatter_cuts_by_the_rule_of_unbatch(name: str) -> None:
    sample, collate = BATCHES[name]
    graph = pg.Graph("rows")
    batches = graph.add(ops.FromIterable([sample] * 3)).then(ops.Batch(3, collate=collate))
    with graph.loader(batches) as loader:
        (chunk,) = loader.chunks()
    expected = [plain(part.data) for part in ops.Unbatch().process(chunk)]
    batches.then(ops.Scatter(["cpu"] * 3))
    with graph.loader() as loader:
        (parts,) = loader
    assert len(parts) == 3
    for part, one in zip(parts, expected, strict=True):
        (row,) = [
            plain(found.data)
            for found in ops.Unbatch().process(
                Chunk(part, chunk.lineages[:1], layout=chunk.layout, batched=True)
            )
        ]
        assert row == one


def test_scatter_names_a_list_that_has_another_number_of_rows() -> None:
    graph = pg.Graph("rows")
    graph.add(ops.FromIterable([{"x": 1}] * 4)).then(ops.Batch(4)).then(
        lambda batch: {**batch, "classes": ["cat", "dog"]}
    ).then(ops.Scatter(["cpu", "cpu"]))
    with graph.loader() as loader, pytest.raises(ValueError, match=r"batch\['classes'\] has 2.*Whole"):
        list(loader)


def test_scatter_gives_what_is_whole_to_every_device_and_cuts_arrays_and_lists() -> None:
    graph = pg.Graph("rows")
    graph.add(ops.FromIterable([{"x": 1}] * 4)).then(ops.Batch(4)).then(
        lambda batch: {
            **batch,
            "classes": Whole(["cat", "dog", "cow", "pig"]),
            "names": list("abcd"),
            "array": np.arange(4),
            "size": (4, 4, 4, 4),
        }
    ).then(ops.Scatter(["cpu", "cpu"]))
    with graph.loader() as loader:
        ((first, second),) = loader
    assert plain(first) == {
        "x": [1, 1],
        "classes": ["cat", "dog", "cow", "pig"],
        "names": ["a", "b"],
        "array": [0, 1],
        "size": (4, 4, 4, 4),
    }
    assert second["names"] == ["c", "d"] and plain(second["array"]) == [2, 3]


def test_batches_side_by_side_keep_what_is_known_of_each() -> None:
    graph = pg.Graph("rows")
    left = graph.add(ops.FromIterable([torch.full((2,), i) for i in range(4)]), name="left")
    right = graph.add(ops.FromIterable(["a b", "c d", "e f", "g h"]), name="right")
    once = graph.add(ops.FromIterable([["p", "q"]] * 2), name="once")
    pairs = left.then(ops.Batch(2, collate=tuple), name="lefts"), right.then(ops.Batch(2), name="rights")
    graph.add(ops.Zip(), *pairs, once).then(ops.Unbatch())
    with graph.loader() as loader:
        assert plain(list(loader)) == [
            ([i, i], text, ["p", "q"]) for i, text in enumerate(["a b", "c d", "e f", "g h"])
        ]


def test_a_batch_of_a_users_regroup_is_known_too() -> None:
    class Pairs(Regroup):
        """Two samples at a time, as they are."""

        gives = "batch"

        def begin(self) -> None:
            self.open_chunks: list[Chunk] = []

        def process(self, chunk: Chunk) -> Any:
            self.open_chunks.append(chunk)
            if len(self.open_chunks) < 2:
                return ()
            chunks, self.open_chunks = self.open_chunks, []
            return [Chunk.group(chunks, tuple(each.data for each in chunks))]

    items = [torch.full((2,), i) for i in range(4)]
    assert plain(through(items, Pairs(), ops.Unbatch())) == plain(items)


def test_the_decision_is_about_parts_and_not_about_lengths() -> None:
    for count in (1, 2, 3):
        batch = {"x": torch.zeros(count), "two": ("a", "b"), "names": ["n"] * count}
        assert resolved(batch, None, count) == {"x": True, "two": {0: False, 1: False}, "names": True}
