"""Several loaders of one graph: at once, in turn, in threads. Nothing that changes is theirs together."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gates import Gate
from torch.utils import data

import pipegraph as pg
from pipegraph import operators as ops

NUMBERS = list(range(400))


def sampled(sampler: Any, then: Callable[[Any], Any] = abs, workers: int = 2) -> pg.Graph:
    graph = pg.Graph("sampled")
    graph.add(ops.FromSequence(NUMBERS, sampler=sampler), workers=workers).then(then)
    return graph


@pytest.mark.parametrize("cached", [False, True])
def test_two_loaders_of_a_graph_with_a_sampler_deliver_all_of_it_each(cached: bool) -> None:
    graph = pg.Graph("sampled")
    node = graph.add(ops.FromSequence(NUMBERS, sampler=data.RandomSampler(NUMBERS)), capacity=4)
    if cached:
        node = node.then(abs).then(ops.Cache("1 MB"))
    with graph.loader(epochs=2) as one, graph.loader(epochs=2) as other:
        for _ in range(2):
            passing = iter(one)
            first = list(itertools.islice(passing, 10))
            assert sorted(other) == NUMBERS
            assert sorted([*first, *passing]) == NUMBERS


class Remembers(data.Sampler[int]):
    """Keeps its epoch until it is drawn from, as ``DistributedSampler`` does."""

    def __init__(self) -> None:
        self.epoch = 0
        self.told: Callable[[str], None] = lambda what: None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told("set_epoch")

    def __iter__(self) -> Iterator[int]:
        self.told("draw")
        yield from [self.epoch * 10 + i for i in range(10)]

    def __len__(self) -> int:
        return 10


def test_loaders_tell_a_sampler_of_their_epochs_and_draw_in_turn() -> None:
    sampler = Remembers()
    source = ops.FromSequence(NUMBERS, sampler=sampler)
    held: list[tuple[str, bool]] = []
    sampler.told = lambda what: held.append((what, source._drawing._lock.locked()))
    graph = pg.Graph("in turn")
    graph.add(source)
    with graph.loader() as one, graph.loader() as other:
        other.set_epoch(3)
        assert list(one) == list(range(10))
        assert list(other) == list(range(30, 40))
        for loader in (one, other):  # their workers' copies wait for the same turn
            assert loader._crew is not None
            assert loader._crew.readers["fromsequence"]._drawing is source._drawing  # type: ignore[attr-defined]
    assert held == [("set_epoch", True), ("draw", True)] * 2


class Endless(data.Sampler[int]):
    """Draws for ever."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(7))


def test_an_endless_sampler_is_drawn_from_without_keeping_the_draws() -> None:
    graph = sampled(Endless())
    with graph.loader() as loader:
        for _ in itertools.islice(loader, 300):
            pass
        assert loader._crew is not None
        sources = [w.operator for w in loader._crew.workers["fromsequence"]]
        for source in [*sources, *loader._crew.readers.values()]:
            held = [value for value in vars(source).values() if isinstance(value, dict | list)]
            assert all(value is NUMBERS or not value for value in held)


async def doubled(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


class Doubler:
    """An object whose call is a coroutine."""

    async def __call__(self, x: int) -> int:
        return 2 * x


@pytest.mark.parametrize("function", [doubled, Doubler()])
def test_an_async_function_works_in_every_loader_of_a_graph(function: Any) -> None:
    graph = pg.Graph("async")
    graph.add(ops.FromIterable(range(50))).then(function, workers=3)
    expected = [2 * x for x in range(50)]
    with graph.loader() as first:
        assert list(first) == expected
    with graph.loader() as second:  # after the first has closed
        assert list(second) == expected
    with graph.loader() as one, graph.loader() as other:
        passing = iter(one)
        head = [next(passing) for _ in range(5)]
        assert list(other) == expected
        other.close()  # ends nothing of the one that runs
        assert head + list(passing) == expected
    with graph.loader(epochs=2) as broken:
        for _ in broken:
            break
        assert list(broken) == expected


def test_two_loaders_of_a_graph_with_an_async_function_run_in_two_threads() -> None:
    graph = pg.Graph("async")
    graph.add(ops.FromIterable(range(200))).then(doubled, workers=3)
    came: list[list[int]] = []

    def run() -> None:
        with graph.loader() as loader:
            came.append(list(loader))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert came == [[2 * x for x in range(200)]] * 3


def test_a_cache_in_memory_belongs_to_one_loader() -> None:
    calls: list[int] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(int(x))
        return x + 1

    graph = pg.Graph("cached")
    source = graph.add(ops.FromSequence(torch.arange(4)))
    source.then(noted).then(ops.Cache("1 MB"))
    with graph.loader() as loader:
        for _ in range(2):
            for value in loader:
                value += 100  # against the rules; it must not reach another loader
    assert len(calls) == 4
    with graph.loader() as loader:
        assert [int(value) for value in loader] == [1, 2, 3, 4]


def test_one_iterator_serves_one_of_two_loaders_that_begin_at_once() -> None:
    began = threading.Barrier(2)

    class Slow:
        """An iterator that lets both loaders ask for it before the first item comes."""

        def __init__(self) -> None:
            self.items = iter(range(10))

        def __iter__(self) -> Slow:
            return self

        def __next__(self) -> int:
            return next(self.items)

    graph = pg.Graph("one shot")
    graph.add(ops.FromIterable(Slow()))
    came: list[Any] = []

    def run() -> None:
        with graph.loader() as loader:
            began.wait(60)
            try:
                came.append(list(loader))
            except pg.PipegraphError as error:
                came.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(type, came), key=str) == [list, str] and list(range(10)) in came
    assert any("can be read once" in each for each in came if isinstance(each, str))


def test_a_state_of_one_loader_continues_in_another_while_the_first_continues_too() -> None:
    graph = sampled(data.DistributedSampler(NUMBERS, 1, 0, seed=3))  # type: ignore[arg-type]
    with graph.loader() as one, graph.loader() as other:
        passing = iter(one)
        head = [next(passing) for _ in range(33)]
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert sorted(head + list(other)) == NUMBERS
        assert sorted(head + list(passing)) == NUMBERS


class MapStyle:
    """A dataset without ``__iter__`` that answers any index, as those that wrap around do."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index % 5


def test_a_map_style_data_set_as_an_iterable_ends_with_its_length() -> None:
    graph = pg.Graph("map style")
    graph.add(ops.FromIterable(MapStyle()))  # type: ignore[arg-type]
    with graph.loader() as loader:
        assert list(itertools.islice(loader, 8)) == [0, 1, 2, 3, 4]


def test_the_end_of_one_loader_is_not_the_end_of_another_that_waits_at_the_same_gate() -> None:
    gate = Gate()
    graph = pg.Graph("gated")
    graph.add(ops.FromIterable(range(4))).then(gate)
    with graph.loader() as one, graph.loader() as other:
        passing = iter(one)
        gate.wait_until_waiting(1)
        iter(other)
        gate.wait_until_waiting(2)
        other.close()
        gate.release_all()
        assert list(passing) == [0, 1, 2, 3]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_is_not_copied_and_says_what_is(copied: Any) -> None:
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3)))
    with graph.loader() as loader, pytest.raises(TypeError, match="send the graph, and call graph.loader"):
        copied(loader)
