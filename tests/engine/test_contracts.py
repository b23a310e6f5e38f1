"""What an operator can do it declares: nothing follows from its name, its class's name or a method that it happens
to have."""

from __future__ import annotations

from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk


class Counting:
    """A mix-in that keeps a count."""

    count = 0

    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


class Promised(pg.Operator):
    stateful = True

    def process(self, chunk: Chunk) -> Chunk:
        return chunk


def test_an_operator_that_declares_a_state_must_have_its_methods() -> None:
    graph = pg.Graph("promised")
    graph.add(ops.FromIterable(range(3))).then(Promised())
    with pytest.raises(pg.PipegraphError, match=r"stage 'promised'.*load_state_dict"):
        graph.plan()


class CountingRoute(Counting, pg.FanOut):
    stateful = True
    outputs = 1

    def choose(self, chunk: Chunk) -> int:
        return 0

    def process(self, chunk: Chunk) -> Chunk:
        return chunk


def test_a_route_with_a_state_is_refused() -> None:
    graph = pg.Graph("route")
    graph.add(ops.FromIterable(range(3))).then(CountingRoute())[0].then(abs)
    with pytest.raises(pg.PipegraphError, match=r"stage 'countingroute'.*a route has no state"):
        graph.plan()
