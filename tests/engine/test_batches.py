"""Which parts of a batch have a row per sample: decided when it is made, by every operator in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.batches import select_rows
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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_torchs_default_collate_makes_comes_apart(size: int) -> None:
    items = [(torch.full((2,), i), f"t{i}", [i, 10 * i], {"p": (i, f"u{i}")}) for i in range(6)]
    collate = torch.utils.data.default_collate
    got = through(items, ops.Batch(size, collate=collate), ops.Unbatch())
    assert [(plain(x), t, plain(ns), plain(d)) for x, t, ns, d in got] == [
        (x.tolist(), t, ns, {"p": [d["p"][0], d["p"][1]]}) for x, t, ns, d in items
    ]


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
