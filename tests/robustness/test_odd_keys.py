"""Keys as people have them: arrays, NumPy numbers and texts, tuples, objects; inline, in bundles, cached and skipped."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


class Place:
    """A key that compares as it likes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        raise TypeError("places cannot be compared")

    def __hash__(self) -> int:
        raise TypeError("places cannot be hashed")

    def __repr__(self) -> str:
        return f"<Place {self.number}>"


KEYS = {
    "array": lambda i: np.array([i, i + 1]),
    "array of one": lambda i: np.array([i]),
    "array of none": lambda i: np.array([]),
    "tensor": lambda i: torch.tensor([i, i]),
    "NumPy number": lambda i: np.int64(i),
    "NumPy text": lambda i: np.str_(f"k{i}"),
    "tuple of arrays": lambda i: (np.array([i, 2]), "x"),
    "bytes": lambda i: b"%d" % i,
    "object": Place,
    "None": lambda i: None,
    "not a number": lambda i: float("nan"),
}


def samples(kind: str, n: int = 12) -> list[dict[str, Any]]:
    return [{"key": KEYS[kind](i), "x": np.full(2, i)} for i in range(n)]


def fails_at_five(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"][0] == 5:
        raise ValueError("five")
    return sample


@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("kind", KEYS)
def test_a_skipped_sample_with_any_key_is_in_the_ledger_the_state_and_the_profile(
    kind: str, backend: str
) -> None:
    def make() -> pg.Graph:
        graph = pg.Graph("keys")
        node = graph.add(ops.FromSequence(samples(kind)), backend=backend)
        node.then(fails_at_five, on_error=pg.Skip(), backend=backend).then(
            ops.Batch(5, collate=list), backend=backend
        )
        return graph

    with make().loader() as loader:
        passing = iter(loader)
        first = [next(passing), next(passing)]
        state = json.dumps(loader.state_dict())
        (gone,) = loader.profile().quarantined
        assert repr(gone.key) == repr(KEYS[kind](5))
        json.loads(loader.profile().to_json())
        assert [int(s["x"][0]) for batch in first for s in batch] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    with make().loader() as loader:
        loader.load_state_dict(json.loads(state))
        assert [int(s["x"][0]) for batch in loader for s in batch] == [11]
        assert len(loader.profile().quarantined) == 1
