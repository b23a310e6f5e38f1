"""Objects with tensors of their own on the way to a device: moved by their own methods, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


class Mesh:
    """A batch of a graph network: moves itself in place, as some libraries' do."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.moves: list[Any] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> Mesh:
        self.moves = [*self.moves, (device.type, non_blocking)]
        self.x = self.x.clone()
        return self


class OfOneArgument(Mesh):
    def to(self, device: torch.device) -> Mesh:  # type: ignore[override]
        return super().to(device)


def through(data: Any, operator: Any) -> Any:
    graph = pg.Graph("g")
    batches = graph.add(ops.FromIterable([data])).then(ops.Batch(1, collate=lambda rows: rows[0]))
    batches.then(operator, name="copy")
    with graph.loader() as loader:
        (found,) = loader
    return found


@pytest.fixture
def target(place: torch.device) -> torch.device:
    """The CPU, then the accelerator; what is moved there is made in host memory."""
    torch.set_default_device(None)
    return place


MOVERS = [
    lambda place: ops.CopyToDevice(place, copy=True),
    lambda place: ops.Scatter([place], copy=True),
]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [Mesh, OfOneArgument])
def test_an_object_moves_itself_and_the_given_one_stays(
    kind: Any, nested: bool, target: torch.device
) -> None:
    given = kind(torch.arange(4.0))
    data = {"a": torch.ones(3), "deep": [(given, 1)]} if nested else given
    found = through(data, MOVERS[0](target))
    moved = found["deep"][0][0] if nested else found
    assert moved.moves == [(target.type, kind is Mesh)]
    assert given.moves == [] and moved.x.tolist() == given.x.tolist() and moved.x is not given.x
    if nested:
        assert found["a"].tolist() == [1, 1, 1] and found["a"] is not data["a"] and found["deep"][0][1] == 1
