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


class Steps(pg.Source):
    """Ten numbers, read from ``start`` on, or always from the first."""

    def __init__(self, exact: bool, length: int | None) -> None:
        self.exact = exact
        self.number = length

    def config(self) -> dict[str, Any]:
        return {}

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        return self.number

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        yield from ((number, number) for number in range(start if self.exact else 0, 10))


class AtRandom(Steps):
    random_access = True
    iterate = pg.Source.iterate

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        return iter(range(start if self.exact else 0, 10))

    def read(self, position: int, epoch: int) -> Any:
        return position


def steps(source: pg.Source, **options: Any) -> pg.Graph:
    graph = pg.Graph("steps")
    graph.add(source, name="steps", **options)
    return graph


@pytest.mark.parametrize("source", [Steps, AtRandom])
def test_a_source_that_does_not_begin_at_its_start_is_found(source: Any) -> None:
    pg.testing.assert_resumes_exactly(lambda: steps(source(True, None)))
    with pytest.raises(
        AssertionError, match=r"stage 'steps': \w+ yields the positions \[0, 1, 2\] for start=1"
    ):
        pg.testing.assert_resumes_exactly(lambda: steps(source(False, None)))


class Counting(Steps):
    """Where it stands is an attribute, so that each call goes on from the one before."""

    stands = 0

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        while self.stands < 10:
            self.stands += 1
            yield self.stands, self.stands
