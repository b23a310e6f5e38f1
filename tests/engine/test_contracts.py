"""What an operator can do it declares: nothing follows from its name, its class's name or a method that it happens
to have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk


def copy(item: Any) -> Any:
    return marked(item)


def pin(item: Any) -> Any:
    return marked(item)


def scatter(item: Any) -> Any:
    return marked(item)


def cache(item: Any) -> Any:
    return marked(item)


def marked(item: Any) -> Any:
    return {**item, "marked": True}


FUNCTIONS = [copy, pin, scatter, cache]


def samples(n: int = 4) -> ops.FromSequence:
    return ops.FromSequence([{"x": torch.tensor(i)} for i in range(n)])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_users_function_runs_whatever_its_name_before_a_scatter(function: Any) -> None:
    graph = pg.Graph("named")
    graph.add(samples()).then(ops.Batch(2)).then(function).then(ops.Scatter(["cpu", "cpu"]))
    with graph.loader() as loader:
        assert all(part["marked"] for batch in loader for part in batch)
    assert "left out" not in str(graph.plan())


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


class Unseeded(AtRandom):
    """Another order in each call."""

    calls = itertools.count()

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        first = next(self.calls)
        return [(first + number) % 10 for number in range(start, 10)]


@pytest.mark.parametrize("source", [Counting, Unseeded])
def test_a_source_that_begins_elsewhere_in_each_call_is_found(source: Any) -> None:
    with pytest.raises(AssertionError, match="stage 'steps': .*depend on the arguments alone"):
        pg.testing.assert_resumes_exactly(lambda: steps(source(True, None)))
