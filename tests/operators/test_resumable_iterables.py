"""Iterables with a state of their own: ``FromIterable`` goes on from it, and delivers what it would have delivered."""

import json
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError, PipegraphWarning, StateError


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


def test_two_loaders_of_one_object_take_no_states_of_each_other() -> None:
    items = Numbers(400)
    with graph(items).loader() as one, graph(items).loader() as other:
        first, second = iter(one), iter(other)
        found = [next(first).tolist() for _ in range(20)]
        found_by_other = [next(second).tolist() for _ in range(5)]
        found += [next(first).tolist() for _ in range(20)]
        assert found_by_other == found[:5]
        state = one.state_dict()
        assert rest(Numbers(400), state) == [each.tolist() for each in first]


def test_methods_of_that_name_that_ask_for_more_are_another_thing() -> None:
    class Odd(Numbers):
        def state_dict(self, samples: int) -> Any:  # type: ignore[override]
            raise AssertionError("nobody knows what to give it")

    pg.testing.assert_resumes_exactly(lambda: graph(Odd(150)))


def test_a_state_may_hold_what_is_no_json() -> None:
    class Odd(Numbers):
        def state_dict(self) -> Any:
            return {"at": torch.tensor([self._at])}

        def load_state_dict(self, state: Any) -> None:
            self._start = int(state["at"][0])

    items = Odd(200)
    with graph(items).loader() as loader:
        for number, _ in enumerate(loader):
            if number == 15:
                state = json.loads(json.dumps(loader.state_dict()))
                break
    assert rest(Odd(200), state)[0][0] == 16 * 8


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


@pytest.mark.parametrize("which", SOURCES)
def test_a_pass_that_was_left_early_does_not_shift_the_next_one(which: str) -> None:
    made = SOURCES[which]
    with single(made()).loader() as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                break
        state, left = next_state(loader, 1)
    with single(made()).loader() as loader:
        loader.load_state_dict(state)
        assert list(loader) == left


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("which", SOURCES)
def test_a_state_before_the_first_batch_leads_back_to_it(which: str, begun: bool) -> None:
    with single(SOURCES[which]()).loader() as loader:
        passing = iter(loader) if begun else None
        state = loader.state_dict()
        passing = passing or iter(loader)
        first = [next(passing) for _ in range(6)]
        loader.load_state_dict(state)
        passing = iter(loader)
        assert [next(passing) for _ in range(6)] == first


class Bare:
    """Items without a state and without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@pytest.mark.parametrize("way", ["thread", "process"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_iterable_that_ends_before_the_state_is_refused(way: str, world_size: int) -> None:
    def made(count: int) -> pg.Graph:
        return single(ops.FromIterable(Bare(count)), backend=way)

    place: Any = {"rank": 0, "world_size": world_size, "equal_steps": False}
    with made(10).loader(**place) as loader:
        state, left = next_state(loader, 10 // world_size)
        assert left == []
    with made(10).loader(**place) as loader:  # as many as were delivered: the epoch is over
        loader.load_state_dict(state)
        assert list(loader) == []
    with made(4).loader(**place) as loader:
        loader.load_state_dict(state)
        delivered = 10 if world_size == 1 else 9
        with pytest.raises(
            StateError, match=f"'numbers': {delivered} items of its iterable .* ended after 4"
        ):
            list(loader)


def test_the_rest_of_an_iterable_at_another_world_size_must_be_there() -> None:
    def made(count: int) -> pg.Graph:
        return single(ops.FromIterable(Bare(count)))

    states = []
    for rank in range(2):
        with made(10).loader(rank=rank, world_size=2, equal_steps=False) as loader:
            states.append(next_state(loader, 3)[0])
    with made(10).loader() as loader:
        loader.load_state_dict(states)
        assert list(loader) == [6, 7, 8, 9]
    with made(4).loader() as loader:
        loader.load_state_dict(states)
        with pytest.raises(StateError, match="6 items of its iterable .* ended after 4"):
            list(loader)


def test_one_iterator_in_two_sources_is_refused() -> None:
    items = iter(range(6))
    made = pg.Graph("numbers")
    made.add(
        ops.Zip(), made.add(ops.FromIterable(items), name="a"), made.add(ops.FromIterable(items), name="b")
    )
    with pytest.raises(GraphError, match="stages 'a' and 'b' read one range_iterator"):
        made.plan()


class Counter:
    """A function with a state, which stages do not save."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: int) -> int:
        self.calls += 1
        return item + self.calls

    def state_dict(self) -> Any:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


def test_a_function_with_a_state_is_said_not_to_be_saved() -> None:
    made = pg.Graph("numbers")
    made.add(ops.FromIterable(range(6))).then(Counter(), name="count")
    with (
        made.loader() as loader,
        pytest.warns(PipegraphWarning, match="'count': a Counter has state_dict"),
    ):
        loader.state_dict()


def test_a_network_is_only_used() -> None:
    made = pg.Graph("numbers")
    made.add(ops.FromIterable([torch.ones(2)])).then(torch.nn.Linear(2, 1), name="score")
    with made.loader() as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.state_dict()


ENDLESS = 10**12  # no stage reads ahead to the end of so many


def cut_short(source: Any, way: str, **stage: Any) -> pg.Graph:
    """A source of which an epoch needs three items only."""
    graph = pg.Graph("cut", seed=1)
    node = graph.add(source, name="numbers", **stage)
    if way == "Zip":
        graph.add(ops.Zip(), graph.add(ops.FromSequence(range(3)), **stage), node, **stage)
    elif way == "Repeat":
        node.then(ops.Repeat(20), **stage).then(ops.Take(3), **stage)
    elif way == "Batch":
        node.then(ops.Batch(2, collate=list), **stage).then(ops.Take(3), **stage)
    else:
        node.then(ops.Take(3), **stage)
    return graph


def drawn(replacement: bool) -> Any:
    generator = torch.Generator().manual_seed(3)
    return ops.FromSequence(
        range(100), sampler=RandomSampler(range(100), replacement=replacement, generator=generator)
    )


@pytest.mark.parametrize("way", ["Take", "Zip", "Repeat", "Batch"])
@pytest.mark.parametrize("replacement", [False, True])
def test_epochs_cut_short_draw_from_a_generator_alike_everywhere(way: str, replacement: bool) -> None:
    expected = None
    for stage in ({"backend": "inline"}, {}, {"capacity": 1}, {"capacity": 500, "workers": 3}):
        with cut_short(drawn(replacement), way, **stage).loader(epochs=3) as loader:
            states, epochs = [], []
            for _ in range(3):
                epochs.append(list(loader))
                states.append(json.loads(json.dumps(loader.state_dict())))
        expected = expected or epochs
        assert epochs == expected
        assert epochs[0] != epochs[1]
        for number, state in enumerate(states[:-1], 1):
            with cut_short(drawn(replacement), way, **stage).loader(epochs=3) as loader:
                loader.load_state_dict(state)
                assert [list(loader) for _ in range(number, 3)] == expected[number:]
        with cut_short(drawn(replacement), way, **stage).loader(epochs=3) as loader:
            passing = iter(loader)
            first = [next(passing)]
            state = json.loads(json.dumps(loader.state_dict()))
        with cut_short(drawn(replacement), way, **stage).loader(epochs=3) as loader:
            loader.load_state_dict(state)
            assert [first + list(loader), list(loader), list(loader)] == expected


def end_its_process(loader: Any) -> None:
    """Between two passes."""
    loader._crew.end_run()
    kill_its_process(loader)


def kill_its_process(loader: Any) -> None:
    [worker] = loader._crew.workers["numbers"]
    ended = os.pidfd_open(worker.operator.pid)
    os.kill(worker.operator.pid, signal.SIGKILL)
    select.select([ended], [], [])
    os.close(ended)


def test_a_process_that_died_between_two_passes_is_no_loss() -> None:
    with single(ops.FromIterable(Bare(ENDLESS)), backend="process").loader() as loader:
        next(iter(loader))
        end_its_process(loader)
        assert list(islice(loader, 20)) == list(range(20))


def test_a_new_process_knows_what_other_ranks_had_consumed() -> None:
    def made() -> pg.Graph:
        return single(ops.FromIterable(Bare(2000)), backend="process")

    states = []
    for rank in range(2):
        with made().loader(rank=rank, world_size=2, equal_steps=False) as loader:
            states.append(next_state(loader, 5)[0])
    with made().loader() as loader:
        loader.load_state_dict(states)
        passing = iter(loader)
        found = [next(passing)]
        kill_its_process(loader)
        assert found + list(passing) == list(range(10, 2000))


# -- the end of an input, and a resume behind it ---------------------------------------------------


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_a_resume_behind_an_ended_input_still_ends_its_epoch(stop, backend):
    """The fan-in no longer needs that input and drops the rest of it, here before it has begun. Inline, the next epoch
    is another run's."""

    def graph():
        graph = pg.Graph("g")
        generator = torch.Generator().manual_seed(3)
        source = ops.FromSequence(
            range(100), sampler=RandomSampler(range(40), generator=generator, num_samples=2)
        )
        zeros = graph.add(ops.FromSequence([0, 0, 0]), backend=backend)
        graph.add(ops.Concat(), graph.add(source, backend="inline"), zeros, backend=backend)
        return graph

    with graph().loader(epochs=2) as loader:
        expected = [list(loader), list(loader)]
    with graph().loader(epochs=2) as loader:
        passing = iter(loader)
        head = [next(passing) for _ in range(stop)]
        state = loader.state_dict()
    with graph().loader(epochs=2) as loader:
        loader.load_state_dict(state)
        epochs = [head + list(loader), list(loader)]
    assert epochs == expected


class Renamed:
    """A sampler that calls its generator as it likes."""

    def __init__(self) -> None:
        self._rng = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(6, generator=self._rng).tolist())


@pytest.mark.parametrize("stop", [3, 6, 8, 13])
def test_a_samplers_generator_is_in_the_state_whatever_its_name(stop: int) -> None:
    def make() -> pg.Graph:
        graph = pg.Graph("renamed")
        graph.add(ops.FromSequence(range(6), sampler=Renamed()))
        return graph

    with make().loader(epochs=3) as loader:
        expected = [item for _ in range(3) for item in loader]
    with make().loader(epochs=3) as loader:
        found = []
        while len(found) < stop:
            found += islice(loader, stop - len(found))
        state = loader.state_dict()
    with make().loader(epochs=3) as loader:
        loader.load_state_dict(state)
        while len(found) < 18:
            found += loader
    assert found == expected
