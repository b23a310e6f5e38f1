"""What an operator can do it declares: nothing follows from its name, its class's name or a method that it happens
to have."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk
from pipegraph.testing import assert_resumes_exactly


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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_users_function_runs_whatever_its_name_behind_slabs(function: Any, tmp_path: Any) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8), (200, 10, 10)).save(tmp_path / "a.png")
    graph = pg.Graph("named")
    node = graph.add(ops.ListFiles(tmp_path)).then(ops.Load()).then(ops.Batch(1)).then(ops.DecodeImage(8))
    node.then(function).then(ops.CopyToDevice("cpu", copy=True))
    assert "left out" not in str(graph.plan())
    with graph.loader() as loader:
        assert all(batch["marked"] for batch in loader)


class Cache(pg.Operator):
    """A class of a user's own with the name, and some methods, of ours."""

    def __init__(self) -> None:
        self.table = {0: "none"}

    def lookup(self, index: int) -> str:
        return self.table.get(index, "some")

    def attach(self, table: dict[int, str]) -> None:
        self.table = table

    def process(self, chunk: Chunk) -> Chunk:
        chunk.data = self.lookup(chunk.data)
        return chunk


def test_an_operator_of_the_same_class_name_and_methods_is_no_cache() -> None:
    graph = pg.Graph("no cache")
    graph.add(ops.FromIterable(range(3))).then(lambda x, rng: x).then(Cache())
    with graph.loader() as loader:
        assert list(loader) == ["none", "some", "some"]


def test_two_functions_called_cache_stand_one_behind_the_other_above_a_cache() -> None:
    graph = pg.Graph("caches")
    graph.add(samples()).then(cache).then(cache).then(ops.Cache("1 MB"))
    with graph.loader() as loader:
        assert len([sample for sample in loader if sample["marked"]]) == 4


class Weighed(torch.nn.Module, pg.Operator):  # type: ignore[misc]
    """A module that is an operator too: its ``state_dict`` is the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def process(self, chunk: Chunk) -> Chunk:
        chunk.data = float((self.weight * chunk.data).detach())
        return chunk


class SaysSo(Weighed):
    stateful = False


class OwnMethods(pg.Operator):
    """Its state is saved by other means."""

    stateful = False

    def state_dict(self) -> Any:
        return object()

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError

    def process(self, chunk: Chunk) -> Chunk:
        chunk.data = float(chunk.data)
        return chunk


@pytest.mark.parametrize("operator", [SaysSo, OwnMethods])
def test_a_state_dict_that_is_there_for_something_else_is_left_alone(operator: Any) -> None:
    graph = pg.Graph("module")
    graph.add(ops.FromIterable(range(100))).then(operator(), workers=2)
    assert graph.plan().elastic
    assert "1 worker instead" not in str(graph.plan())
    with graph.loader() as loader:
        passing = iter(loader)
        assert [next(passing) for _ in range(70)] == [float(i) for i in range(70)]
        assert "weight" not in json.dumps(loader.state_dict())


def test_an_operator_that_inherits_a_state_from_elsewhere_must_say_what_it_is_for() -> None:
    graph = pg.Graph("undeclared")
    graph.add(ops.FromIterable(range(3))).then(Weighed())
    with pytest.raises(pg.PipegraphError, match=r"stage 'weighed'.*stateful = True.*stateful = False"):
        graph.plan()


class Counting:
    """A mix-in that keeps a count."""

    count = 0

    def state_dict(self) -> Any:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


class Counted(Counting, pg.Operator):
    stateful = True

    def process(self, chunk: Chunk) -> Chunk:
        self.count += 1
        chunk.data = (chunk.data, self.count)
        return chunk


class Promised(pg.Operator):
    stateful = True

    def process(self, chunk: Chunk) -> Chunk:
        return chunk


def test_a_state_from_a_mix_in_is_one_where_the_operator_says_so() -> None:
    def make() -> pg.Graph:
        graph = pg.Graph("counted")
        graph.add(ops.FromIterable(range(6))).then(Counted())
        return graph

    assert_resumes_exactly(make)


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


class Outputs(pg.Source):
    """A source with attributes that mean something else on an operator."""

    outputs = 3
    function = None

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        yield from ((step, step) for step in range(start, 4))


def test_attributes_of_a_users_source_mean_nothing_that_it_did_not_declare() -> None:
    graph = pg.Graph("attributes")
    graph.add(Outputs()).then(abs)
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2, 3]


def test_a_stage_cannot_take_the_name_under_which_a_state_notes_what_was_delivered() -> None:
    graph = pg.Graph("reserved")
    with pytest.raises(pg.PipegraphError, match=r"'\(output\)'"):
        graph.add(ops.FromIterable(range(3)), name="(output)")


def test_numpy_numbers_of_a_route_are_numbers() -> None:
    graph = pg.Graph("routes")
    routed = graph.add(ops.FromIterable(range(4))).then(ops.Route(lambda x: np.int64(x % 2), 2))
    graph.add(ops.Merge(), routed[0], routed[1])
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2, 3]


class Scale(pg.Operator):
    """Has parameters and no ``config()``; ``seen`` changes while it works."""

    def __init__(self, factor: Any, how: Any = abs, table: Any = ()) -> None:
        self._factor = factor
        self.how = how
        self.table = table
        self.seen: list[int] = []
        self.made_by = object()

    def process(self, chunk: Chunk) -> Chunk:
        self.seen.append(chunk.data)
        chunk.data = self.how(chunk.data)
        return chunk


def scaled(*parameters: Any) -> pg.Graph:
    graph = pg.Graph("scaled")
    graph.add(ops.FromIterable(range(20))).then(Scale(*parameters), name="scale")
    return graph


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2,), (3,)),
        ((2.0,), (2,)),
        (("a",), (b"a",)),
        (([1, 2],), ([1, 3],)),
        (({"a": (1, None)},), ({"a": (1, True)},)),
        (({1, 2},), ({1, 3},)),
        ((1, abs), (1, copy)),
        ((1, abs, [0] * 2000), (1, abs, [0] * 2001)),
    ],
)
def test_other_parameters_of_an_operator_without_config_are_noticed(saved: Any, loaded: Any) -> None:
    with scaled(*saved).loader() as loader:
        state = loader.state_dict()
    with (
        scaled(*loaded).loader() as loader,
        pytest.raises(pg.errors.StateError, match=r"stage 'scale' has other parameters.*no config\(\)"),
    ):
        loader.load_state_dict(state)


def test_what_an_operator_without_config_gathers_while_it_runs_is_no_parameter() -> None:
    graph = scaled(2)
    with graph.loader() as loader:
        passing = iter(loader)
        head = [next(passing) for _ in range(5)]
        state = json.loads(json.dumps(loader.state_dict()))
    for other in (graph, scaled(2)):
        with other.loader() as loader:
            loader.load_state_dict(state)
            assert head + list(loader) == list(range(20))


def test_every_operator_of_ours_with_parameters_says_which_count() -> None:
    from pipegraph.contracts import Component

    graph = pg.Graph("ours")
    made = [
        ops.Unbatch(),
        ops.Zip(),
        ops.Concat(),
        ops.Merge(),
        ops.Pin(),
        ops.Load(),
        ops.Cache(9),
    ]
    for operator in made:
        if type(operator).config is Component.config:
            assert not vars(operator)
    assert not graph.stages


def test_a_route_may_choose_by_a_comparison_of_numpy() -> None:
    graph = pg.Graph("g")
    routed = graph.add(ops.FromSequence(range(4))).then(ops.Route(lambda x: np.int64(x) > 1, 2))
    graph.add(ops.Merge(), routed[0], routed[1].then(lambda x: -x))
    with graph.loader() as loader:
        assert list(loader) == [0, -2, 1, -3]


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


class Drawn(AtRandom):
    """Its order is drawn from torch's generator, which the stage seeds."""

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        return torch.randperm(10).tolist()[start:]


class DrawnLate(AtRandom):
    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Any:
        yield from torch.randperm(10).tolist()[start:]


@pytest.mark.parametrize("source", [Counting, Unseeded])
def test_a_source_that_begins_elsewhere_in_each_call_is_found(source: Any) -> None:
    with pytest.raises(AssertionError, match="stage 'steps': .*depend on the arguments alone"):
        pg.testing.assert_resumes_exactly(lambda: steps(source(True, None)))


@pytest.mark.parametrize("options", [{}, {"backend": "process"}], ids=["thread", "process"])
@pytest.mark.parametrize("source", [Drawn, DrawnLate])
def test_a_source_may_draw_its_positions_from_torch(source: Any, options: Any) -> None:
    pg.testing.assert_resumes_exactly(lambda: steps(source(True, None), **options))


@pytest.mark.parametrize("length", [7, 12])
@pytest.mark.parametrize("source", [Steps, AtRandom])
def test_a_source_of_another_length_than_it_says_is_found(source: Any, length: int) -> None:
    with pytest.raises(AssertionError, match=f"stage 'steps': length.. says that epoch 0 has {length} items"):
        pg.testing.assert_resumes_exactly(lambda: steps(source(True, length)))
