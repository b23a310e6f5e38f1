"""Users' iterators whose ``__iter__`` begins anew and returns ``self``: each item comes once, also after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops

COUNT = 200
DONE = 97  # behind the first snapshot


class Rewinds:
    def __init__(self, items: Any) -> None:
        self.given = list(items)

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Iterator[Any]:
        self.n = 0
        return self

    def __next__(self) -> Any:
        if self.n == len(self.given):
            raise StopIteration
        self.n += 1
        return self.given[self.n - 1]


class WithState(Rewinds):
    n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Sampler:
    """Its iterators rewind; FromSequence takes none that is an iterator itself."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(Rewinds(range(COUNT)))


class SamplerWithState(Sampler):
    """Its state is of the beginning of each epoch."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class InSequence(pg.Source):
    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        steps = range(start, COUNT // world_size)
        return Rewinds((step * world_size + rank, step * world_size + rank) for step in steps)


class ByPosition(pg.Source):
    random_access = True

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        return Rewinds(range(rank + start * world_size, COUNT, world_size))

    def read(self, position: int, epoch: int) -> int:
        return position


def numbers(start: int) -> Rewinds:
    return Rewinds(range(start, start + 50))


class Fifties(pg.Operator):
    kind = "expand"
    one_to_one = False

    def process(self, chunk: pg.Chunk) -> Any:
        return Rewinds(chunk.child(index, chunk.data + index) for index in range(50))


STARTS = [*range(0, COUNT, 50)]
SOURCES: dict[str, Any] = {
    "sampler": lambda: ops.FromSequence(range(COUNT), sampler=Sampler()),
    "sampler with a state": lambda: ops.FromSequence(range(COUNT), sampler=SamplerWithState()),
    "iterable": lambda: ops.FromIterable(Rewinds(range(COUNT))),
    "callable": lambda: ops.FromIterable(lambda: Rewinds(range(COUNT))),
    "iterator with a state": lambda: ops.FromIterable(lambda: WithState(range(COUNT))),
    "interleave": lambda: ops.Interleave(STARTS, numbers, cycle=1),
    "object with a state": lambda: ops.FromIterable(WithState(range(COUNT))),
    "iterate": InSequence,
    "positions": ByPosition,
    "repeated": InSequence,
}


@pytest.mark.parametrize("backend", ["inline", "process"])
@pytest.mark.parametrize("name", SOURCES)
def test_each_item_of_an_iterator_that_rewinds_comes_once(name: str, backend: Any) -> None:
    def made() -> Any:
        graph = pg.Graph("rewinds", seed=1)
        items = graph.add(SOURCES[name](), name="items", backend=backend)
        if name == "repeated":
            items.then(ops.Repeat(1))
        return graph.loader()

    with made() as loader:
        passing = iter(loader)
        found = list(islice(passing, DONE))
        state = loader.state_dict()
        assert found + list(passing) == [*range(COUNT)]
    with made() as again:
        again.load_state_dict(state)
        assert list(again) == [*range(DONE, COUNT)]


@pytest.mark.parametrize("backend", ["inline", "process"])
@pytest.mark.parametrize("expand", [ops.FlatMap(numbers), Fifties()], ids=["FlatMap", "expand"])
def test_each_child_of_an_iterator_that_rewinds_comes_once(expand: Any, backend: Any) -> None:
    def made() -> Any:
        graph = pg.Graph("rewinds", seed=1)
        graph.add(ops.FromSequence(STARTS), name="starts").then(expand, name="children", backend=backend)
        return graph.loader()

    with made() as loader:
        passing = iter(loader)
        found = list(islice(passing, DONE))
        state = loader.state_dict()
        assert found + list(passing) == [*range(COUNT)]
    with made() as again:
        again.load_state_dict(state)
        assert list(again) == [*range(DONE, COUNT)]
