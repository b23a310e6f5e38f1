"""Functions that draw from the global generators: each sample has its own numbers, the training thread keeps its own."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gates import Sequencer
from torch.nn import functional

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.randomness import key


def delivered(function: Callable[..., Any], n: int, workers: int) -> list[Any]:
    graph = pg.Graph("drawn", seed=3)
    graph.add(ops.FromSequence(range(n))).then(function, workers=workers)
    with graph.loader() as loader:
        return list(loader)


def drawn_in_turn(turns: dict[int, int]) -> list[float]:
    """What each sample draws, where sample i is the ``turns[i]``-th to draw."""
    step = Sequencer()

    def draw(x: int) -> float:
        with step(turns[x]):
            return float(torch.rand(()))

    torch.manual_seed(0)
    return delivered(draw, 2, workers=2)


def test_a_sample_draws_the_same_from_torch_whichever_worker_comes_first() -> None:
    assert drawn_in_turn({0: 0, 1: 1}) == drawn_in_turn({0: 1, 1: 0})


def test_a_pipeline_that_draws_from_torch_leaves_the_training_threads_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    delivered(lambda x: torch.rand(()), 4, workers=1)
    assert torch.equal(torch.rand(3), expected)


def seeds_some(x: int) -> list[float]:
    if x % 2:
        torch.manual_seed(5)
    return torch.rand(2).tolist()


def seeds_within(x: int) -> list[float]:
    before = torch.rand(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        torch.rand(3)
    return [float(before), float(torch.rand(()))]


def draws_two(x: int) -> list[float]:
    return [float(torch.rand(1)), float(torch.rand(()))]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_seed_of_the_users_holds_for_the_rest_of_its_sample(workers) -> None:
    def found(function: Callable[[int], Any]) -> list[Any]:
        return delivered(lambda x: function(x), 8, workers)  # stages of one name draw the same

    assert found(seeds_within) == found(draws_two)
    seeded = torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
    others = found(lambda x: torch.rand(2).tolist())
    assert found(seeds_some) == [seeded if x % 2 else others[x] for x in range(8)]
    assert len({*found(lambda x: torch.initial_seed())}) == 8


def draws_lazily(x: int) -> Iterator[float]:
    yield torch.rand(()).item()


def seeds_some_lazily(x: int) -> Iterator[float]:
    if x % 3 == 1:
        torch.manual_seed(5)
    yield torch.rand(()).item()


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_a_seed_set_in_an_operator_is_over_with_its_sample_and_unknown_to_the_trainer(backend: str) -> None:
    def found(function: Callable[[int], Any]) -> list[float]:
        graph = pg.Graph("drawn", seed=3)
        graph.add(ops.FromSequence(range(9))).then(ops.FlatMap(function), name="draw", backend=backend)
        with graph.loader() as loader:
            return list(loader)

    before = torch.get_rng_state()
    seeded, plain = found(seeds_some_lazily), found(draws_lazily)
    assert torch.equal(torch.get_rng_state(), before)
    given = torch.rand((), generator=torch.Generator().manual_seed(5)).item()
    assert seeded == [given if x % 3 == 1 else plain[x] for x in range(9)]


def draw_in_every_way(x: int) -> list[Any]:
    ones = torch.ones(4)
    return [
        x,
        *(torch.rand(2), torch.randn(2), torch.randint(9, (2,)), torch.randperm(4), torch.rand_like(ones)),
        *(
            torch.bernoulli(ones / 2),
            torch.multinomial(ones, 2),
            torch.normal(0.0, 1.0, (2,)),
            torch.poisson(ones),
        ),
        *(
            functional.dropout(ones, 0.5),
            functional.alpha_dropout(ones, 0.5, True),
            torch.empty(2).uniform_(),
        ),
        *(
            torch.nn.init.kaiming_uniform_(torch.empty(2, 2)),
            torch.empty(2).exponential_(),
            functional.rrelu(-ones, training=True),
        ),
        *(torch.distributions.Beta(ones, ones).sample(), torch.nn.Linear(2, 2).weight.detach()),
    ]


def outcome(items: list[Any]) -> list[Any]:
    return [[each.tolist() if isinstance(each, torch.Tensor) else each for each in item] for item in items]


class Augmented:
    """A dataset that draws as it is read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return draw_in_every_way(index)


class AugmentedInGroups(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


PLACES: dict[str, dict[str, Any]] = {
    "inline": {"backend": "inline"},
    "1 thread": {"workers": 1},
    "2 threads": {"workers": 2},
    "4 threads": {"workers": 4, "capacity": 3},
    "2 processes": {"workers": 2, "backend": "process"},
}


def stages_of(kind: str, graph: pg.Graph, options: dict[str, Any]) -> None:
    source: Any = ops.FromSequence(range(24), shuffle=True)
    if kind == "map":
        graph.add(source).then(draw_in_every_way, **options)
    elif kind == "map on its way to a batch":
        graph.add(source).then(draw_in_every_way, **options).then(ops.Batch(5, collate=list)).then(
            ops.Unbatch()
        )
    elif kind == "dataset":
        graph.add(ops.FromSequence(Augmented(), shuffle=True), **options)
    elif kind == "dataset in groups":
        graph.add(ops.FromSequence(AugmentedInGroups(), shuffle=True), **options)
    elif kind == "iterable":

        def made(epoch: int) -> Iterator[Any]:
            for x in range(24):
                yield draw_in_every_way(x)

        graph.add(ops.FromIterable(made), **options)
    elif kind == "flat map":

        def twice(x: int) -> Iterator[Any]:
            yield draw_in_every_way(x)
            yield draw_in_every_way(-x)

        graph.add(source).then(ops.FlatMap(twice), **options)
    elif kind == "collate":
        graph.add(source).then(ops.Batch(3, collate=lambda items: draw_in_every_way(items[0])), **options)
    elif kind == "sampler":
        sampler = torch.utils.data.RandomSampler(range(24))
        graph.add(ops.FromSequence([[x] for x in range(24)], sampler=sampler), **options)
    else:

        async def later(x: int) -> Any:
            first = torch.rand(())
            await asyncio.sleep(0)
            return [*draw_in_every_way(x), first, torch.rand(())]

        graph.add(source).then(later, **options)


KINDS = [
    "map",
    "map on its way to a batch",
    "dataset",
    "dataset in groups",
    "iterable",
    "flat map",
    "collate",
    "sampler",
    "async",
]


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_functions_give_the_same_numbers_in_every_place_and_leave_the_training_threads_alone(
    kind: str,
) -> None:
    found = {}
    for place, options in PLACES.items():
        graph = pg.Graph("drawn", seed=3)
        stages_of(kind, graph, options)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with graph.loader(epochs=2) as loader:
            found[place] = [outcome(list(loader)), outcome(list(loader))]
        assert torch.equal(torch.get_rng_state(), before), place
    expected = found.pop("inline")
    assert expected[0] != expected[1]
    for place, epochs in found.items():
        assert epochs == expected, place


def draw_from_all(x: int) -> list[Any]:
    return [
        x,
        random.random(),
        random.choice("abcdefgh"),
        float(np.random.rand()),
        np.random.permutation(5).tolist(),
        torch.rand(2),
    ]


@pytest.mark.parametrize("batched", [False, True])
def test_in_processes_numpy_and_python_draw_the_samples_own_numbers_too(batched: bool) -> None:
    def run(workers: int) -> list[Any]:
        graph = pg.Graph("drawn", seed=3)
        drawn = graph.add(ops.FromSequence(range(24), shuffle=True)).then(
            draw_from_all, workers=workers, backend="process"
        )
        if batched:
            drawn.then(ops.Batch(5, collate=list)).then(ops.Unbatch())
        with graph.loader() as loader:
            return outcome(list(loader))

    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())

    before = states()
    one = run(1)
    assert one == run(3)
    assert states() == before  # the trainer's own
    assert len({item[1] for item in one}) == len({item[3] for item in one}) == 24


HELD: dict[str, Any] = {}


def drawn_numpy(x: int) -> Any:
    legacy = np.random.mtrand._rand
    if x % 6 == 0:
        return np.random.randn(3).tolist(), np.random.randint(1000), np.random.standard_normal()
    if x % 6 == 1:
        state = np.random.get_state()
        first = legacy.normal(size=3).tolist()
        np.random.set_state(state)
        return first, np.random.normal(size=3).tolist(), legacy.bytes(3)
    if x % 6 == 2:
        np.random.seed(4)
        return np.random.permutation(9).tolist()
    if x % 6 == 3:
        other = np.random.RandomState(5)
        other.randn()  # has a second number ready
        np.random.set_state(other.get_state(legacy=x % 4 == 1))
        return np.random.randn(3).tolist()
    if x % 6 == 4:
        return pickle.loads(pickle.dumps(legacy)).rand(3).tolist(), legacy.rand(3).tolist()
    rand = HELD.setdefault("numpy's", np.random.rand)
    return rand(1000).tolist(), np.random.get_bit_generator().random_raw(2).tolist()


def drawn_python(x: int) -> Any:
    if x % 6 == 0:
        return random.gauss(0, 1), random.sample(range(100), 5), random.gauss(0, 1), random.gauss(0, 1)
    if x % 6 == 1:
        state = random.getstate()
        first = random.choices("abc", k=9)
        random.setstate(state)
        return first, random.choices("abc", k=9), random.randbytes(3)
    if x % 6 == 2:
        random.seed(4)
        return random.random(), random.getrandbits(70)
    if x % 6 == 3:
        random.setstate(random.Random(5).getstate())
        return random.uniform(0, 9), random.shuffle([*range(5)])
    if x % 6 == 4:
        return random.getrandbits(70), random.expovariate(1)
    held = HELD.setdefault("python's", random.random)
    return held(), random.random(), held(), HELD.setdefault("the other", random.random)()


@pytest.mark.parametrize("draw", [drawn_numpy, drawn_python])
def test_any_draw_is_that_of_a_generator_seeded_for_the_sample(
    draw: Callable[[int], Any],
) -> None:
    graph = pg.Graph("drawn", seed=3)
    mapped = ops.Map(draw)
    graph.add(ops.FromIterable(range(36)), name="items").then(
        mapped, name="draw", workers=1, backend="process"
    )
    with graph.loader() as loader:
        found = list(loader)
    states = random.getstate(), np.random.get_state()
    try:
        for x in range(36):
            number = key(3, 0, ("items", x), "draw", "process")
            random.seed(number >> 64 & 0xFFFFFFFF)
            np.random.seed(number & 0xFFFFFFFF)
            assert found[x] == draw(x), x
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        HELD.clear()


def test_a_sample_that_is_tried_again_draws_the_same_numbers() -> None:
    failed: set[int] = set()

    def flaky(x: int) -> float:
        drawn = float(torch.rand(()))
        if x % 3 == 0 and x not in failed:
            failed.add(x)
            raise OSError("not yet")
        return drawn

    def run() -> list[float]:
        graph = pg.Graph("tried")
        graph.add(ops.FromSequence(range(9))).then(flaky, name="flaky", on_error=pg.Retry(2))
        with graph.loader() as loader:
            return list(loader)

    assert run() == run()


def drawn() -> float:
    return float(torch.rand(()))
