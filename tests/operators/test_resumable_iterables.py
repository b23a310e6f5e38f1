"""Iterables with a state of their own: ``FromIterable`` goes on from it, and delivers what it would have delivered."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


class Numbers:
    """Counts what was read of it; its state is kept by the object, not by an iterator, as in many datasets."""

    def __init__(self, count: int = 1000) -> None:
        self.count = count
        self.epoch = 0
        self.reads = 0
        self._start = self._at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        epoch = self.epoch
        for number in range(start, self.count):
            self.reads += 1
            self._at = number + 1
            yield 10_000 * epoch + number

    def state_dict(self) -> Any:
        return {"at": self._at}

    def load_state_dict(self, state: Any) -> None:
        self._start = state["at"]


def graph(items: Any, batch: int = 8, shard: bool = True) -> pg.Graph:
    made = pg.Graph("numbers")
    made.add(ops.FromIterable(items, shard=shard), name="numbers").then(ops.Batch(batch))
    return made


def rest(items: Any, state: Any, batch: int = 8) -> list[list[int]]:
    with graph(items, batch).loader() as loader:
        loader.load_state_dict(state)
        return [each.tolist() for each in loader]


def test_every_state_gives_the_rest() -> None:
    pg.testing.assert_resumes_exactly(lambda: graph(Numbers(300)))


@pytest.mark.parametrize("batch", [1, 8])
def test_a_resume_in_the_middle_reads_only_what_is_left(batch: int) -> None:
    whole, left = Numbers(), Numbers()
    with graph(whole, batch).loader() as loader:
        found = []
        for number, each in enumerate(loader):
            found.append(each.tolist())
            if number == 800 // batch:
                state = json.loads(json.dumps(loader.state_dict()))
    assert found[800 // batch + 1 :] == rest(left, state, batch)
    assert left.reads <= 200 + 64


def test_each_epoch_is_set_and_a_state_holds_for_its_epoch_only() -> None:
    items = Numbers(200)
    with graph(items).loader(epochs=2) as loader:
        assert [next(iter(loader))[0].item() for _ in range(2)] == [0, 10_000]
        loader.set_epoch(0)
        for number, _ in enumerate(loader):
            if number == 20:
                state = loader.state_dict()
                break
    assert rest(items, state)[0][0] == 21 * 8
    with graph(items).loader() as loader:
        assert next(iter(loader))[0] == 0


def test_ranks_share_one_stream_each_going_on_from_its_own_state() -> None:
    def run(rank: int, state: Any = None, stop: int | None = None) -> tuple[list[int], Any]:
        with graph(Numbers(500), 4).loader(rank=rank, world_size=2, equal_steps=False) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found: list[int] = []
            for number, each in enumerate(loader):
                found += each.tolist()
                if number == stop:
                    return found, loader.state_dict()
            return found, None

    for rank in range(2):
        begun, state = run(rank, stop=40)
        assert begun + run(rank, state)[0] == list(range(rank, 500, 2))


def shuffled() -> torch.utils.data.RandomSampler:
    generator = torch.Generator()
    generator.manual_seed(next(_seeds))  # another one in each process
    return torch.utils.data.RandomSampler(range(40), generator=generator)


_seeds = iter(range(1_000_000))


SOURCES: dict[str, Callable[[], Any]] = {
    "set to epochs": lambda: ops.FromIterable(Numbers(150)),
    "generator": lambda: ops.FromSequence(range(40), sampler=shuffled()),
}


def single(source: Any, **options: Any) -> pg.Graph:
    made = pg.Graph("single")
    made.add(source, name="numbers", **options)
    return made


def next_state(loader: Any, stop: int) -> tuple[Any, list[Any]]:
    """The state behind ``stop`` items of a pass (0: before it), and what follows them."""
    if not stop:
        return json.loads(json.dumps(loader.state_dict())), list(loader)
    passing = iter(loader)
    for _ in range(stop):
        next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    return state, list(passing)


@pytest.mark.parametrize("way", ["thread", "process"])
@pytest.mark.parametrize("which", SOURCES)
def test_a_state_of_a_later_epoch_gives_that_epoch(which: str, way: str) -> None:
    made = SOURCES[which]
    options: Any = {"backend": "process"} if way == "process" else {}
    with single(made(), **options).loader() as loader:
        list(loader)
        found = [next_state(loader, stop) for stop in (0, 1, 5)]
        following = list(loader)
    for number, (state, left) in enumerate(found):
        with single(made(), **options).loader() as again:
            again.load_state_dict(state)
            assert list(again) == left, number
            then = [*(each for _, each in found[number + 1 :]), following][0]
            assert list(again)[-len(then) :] == then
