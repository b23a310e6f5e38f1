"""A buffer that a function or an iterable fills again changes what waits in queues: it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError

BUFFER = np.zeros(4)
TENSOR = torch.zeros(4)


def filled() -> Iterator[Any]:
    for value in range(12):
        BUFFER[:] = value
        yield {"x": BUFFER}


def in_turn() -> Iterator[Any]:
    ring = [np.zeros(2) for _ in range(4)]
    for value in range(12):
        ring[value % 4][:] = value
        yield ring[value % 4]


def large() -> Iterator[Any]:
    buffer = np.zeros(1 << 18)
    for value in range(12):
        buffer[:] = value
        yield buffer


def windows() -> Iterator[Any]:
    for value in range(12):
        BUFFER[: 1 + value % 3] = value
        yield BUFFER[: 1 + value % 3]


def fill(value: int) -> torch.Tensor:
    return TENSOR.fill_(value)


def fill_with(value: int, rng: np.random.Generator) -> torch.Tensor:
    return TENSOR.fill_(rng.random())


async def fill_later(value: int) -> list[torch.Tensor]:
    return [TENSOR.fill_(value)]


def fill_each(value: int) -> Iterator[torch.Tensor]:
    for each in range(3):
        yield TENSOR.fill_(value + each)


def stack(rows: list[Any]) -> Any:
    np.stack(rows, out=BUFFER[: len(rows)])
    return BUFFER


def shared(value: int) -> tuple[int, np.ndarray[Any, Any]]:
    return value, BUFFER


def add(batch: Any) -> Any:
    batch += 1
    return {"sum": batch}


REUSED: dict[str, Callable[[], list[Any]]] = {
    "generator": lambda: [ops.FromIterable(filled)],
    "in turn": lambda: [ops.FromIterable(in_turn)],
    "large": lambda: [ops.FromIterable(large)],
    "views": lambda: [ops.FromIterable(windows())],
    "map": lambda: [ops.FromSequence(range(12)), ops.Map(fill)],
    "map with rng": lambda: [ops.FromSequence(range(12)), ops.Map(fill_with)],
    "async": lambda: [ops.FromSequence(range(12)), ops.Map(fill_later)],
    "flat map": lambda: [ops.FromSequence(range(12)), ops.FlatMap(fill_each)],
    "collate": lambda: [ops.FromSequence(range(12)), ops.Batch(2, collate=stack)],
}


class Record:
    """A sample that knows its reader, which counts in an array of its own."""

    seen = np.zeros(4)

    def __init__(self, value: int) -> None:
        self.reader = Record
        Record.seen[:] = value


FINE: dict[str, Callable[[], list[Any]]] = {
    "the same object": lambda: [ops.FromSequence(range(12)), ops.Map(shared)],
    "an object's own": lambda: [ops.FromSequence(range(12)), ops.Map(Record)],
    "many": lambda: [
        ops.FromSequence([{each: np.zeros(1) for each in "abcdefgh"} for _ in range(2048)]),
        ops.Batch(1024, collate=list),
    ],
    "in place": lambda: [ops.FromSequence(range(12)), ops.Batch(2), ops.Map(add)],
    "its input": lambda: [ops.FromIterable(lambda: iter([TENSOR] * 12)), ops.Map(lambda each: each)],
    "a copy": lambda: [ops.FromSequence(range(12)), ops.Map(lambda value: fill(value).clone())],
}


def graph_of(operators: list[Any], backend: str) -> pg.Graph:
    graph = pg.Graph("reused")
    node = graph.add(operators[0])
    for operator in operators[1:]:
        node = node.then(operator, backend=backend)
    return graph


@pytest.mark.parametrize("backend", ["thread", "inline", "process"])
@pytest.mark.parametrize("case", REUSED)
def test_a_buffer_that_is_filled_again_is_refused(case: str, backend: str) -> None:
    operators = REUSED[case]()
    with (
        graph_of(operators, backend).loader() as loader,
        pytest.raises(GraphError, match="gives the same buffer again with other values"),
    ):
        list(loader)


@pytest.mark.parametrize("backend", ["thread", "inline"])
@pytest.mark.parametrize("case", FINE)
def test_what_changes_nothing_is_not(case: str, backend: str) -> None:
    with graph_of(FINE[case](), backend).loader() as loader:
        assert list(loader)
