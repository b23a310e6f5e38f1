"""Operators and functions as new users write them: what works, and what is said of the rest."""

import asyncio
import collections
import json

import numpy as np
import pytest
import torch
from gates import Gate

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.loader import delivered
from pipegraph.testing import no_leaks

__all__ = ["no_leaks"]


pytestmark = pytest.mark.usefixtures("no_leaks")

PLACEMENTS = [{"backend": "inline"}, {"workers": 1}, {"workers": 3}, {"workers": 3, "ordered": False}]
placed = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


def numbers(items=8, **options):
    graph = pg.Graph("odd", seed=1)
    return graph, graph.add(ops.FromIterable(range(items)), name="source", **options)


class InSequence(pg.Source):
    """Its positions are NumPy's."""

    def length(self, epoch, rank, world_size):
        return 12

    def iterate(self, epoch, rank, world_size, start):
        for position in np.arange(12)[start:]:
            yield position, int(position)


class AtRandom(InSequence):
    random_access = True

    def positions(self, epoch, rank, world_size, start):
        return iter(np.arange(12)[start:])

    def read(self, position, epoch):
        return int(position)


@pytest.mark.parametrize("source", [InSequence, AtRandom])
@pytest.mark.parametrize("batched", [False, True])
def test_positions_may_be_numpy_integers_and_the_state_is_json(source, batched):
    def fail(x):
        if x == 2:
            raise ValueError(x)
        return x

    def graph():
        graph = pg.Graph("positions")
        node = graph.add(source(), name="source").then(lambda x: x, workers=2, ordered=batched)
        node = node.then(fail, name="fail", on_error=pg.Skip())
        if batched:
            node.then(ops.Batch(2, collate=list))
        return graph

    with graph().loader() as loader:
        chunks = loader.chunks()
        got = list(next(chunks).lineages) + list(next(chunks).lineages) + list(next(chunks).lineages)
        assert all(type(row[1]) is int for row in got)
        state = json.loads(json.dumps(loader.state_dict()))
    with graph().loader() as loader:
        loader.load_state_dict(state)
        got += [row for chunk in loader.chunks() for row in chunk.lineages]
    assert sorted(row[1] for row in got) == [0, 1, *range(3, 12)]


def test_hundreds_of_inline_stages_in_a_row_run():
    graph, node = numbers()
    for number in range(400):
        node = node.then(lambda x: x + 1, name=f"n{number}", backend="inline")
    assert "runs in a thread of its own: more than" in str(graph.plan())
    with graph.loader() as loader:
        assert list(loader) == list(range(400, 408))


def test_few_inline_stages_stay_inline():
    graph, node = numbers()
    for number in range(30):
        node = node.then(lambda x: x, name=f"n{number}", backend="inline")
    assert {graph.plan().stages[f"n{number}"].backend for number in range(30)} == {"inline"}


@placed
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_what_is_no_exception_names_the_stage_that_raised_it(kind, placement):
    def leave(x):
        if x == 3:
            raise kind("enough")
        return x

    graph, node = numbers()
    node.then(leave, name="leaves", **placement).then(lambda x: x, name="below").then(
        lambda x: x, name="last"
    )
    got = []
    with graph.loader() as loader, pytest.raises(kind) as caught:
        for x in loader:
            got.append(x)
    if placement.get("ordered", True):
        assert got == [0, 1, 2]
    assert [text for text in caught.value.__notes__ if "stage" in text] == [
        "pipegraph: stage 'leaves', sample 3 at position 3, epoch 0"
    ]


@pytest.mark.parametrize("choice", [np.array([1]), np.array([0, 1]), "1", None, 1.0], ids=repr)
def test_a_choice_that_is_no_number_is_a_failure_of_its_item(choice):
    def choose(x):
        return choice if x == 3 else x % 2

    def graph(**options):
        graph, node = numbers(6)
        route = node.then(ops.Route(choose, 2), name="route", **options)
        graph.add(ops.Merge(), route[0], route[1])
        return graph

    with graph(on_error=pg.Skip()).loader() as loader:
        assert list(loader) == [0, 1, 2, 5, 4]
    with (
        graph().loader() as loader,
        pytest.raises(TypeError, match="choose must return an output number, got"),
    ):
        list(loader)


def test_a_choice_may_be_a_numpy_or_torch_number():
    for one in (np.int64(1), np.array(1), torch.tensor(1), True):
        graph, node = numbers(4)
        route = node.then(ops.Route(lambda x, one=one: one, 2))
        graph.add(ops.Merge(), route[0], route[1])
        with graph.loader() as loader:
            assert list(loader) == [0, 1, 2, 3]


class Forgets(pg.Operator):
    """Forgets to return its chunk."""

    def process(self, chunk):
        chunk.data = chunk.data + 1


class Counts(Forgets):
    """Has a state besides."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Drops(pg.Operator):
    """Says that it drops."""

    one_to_one = False

    def process(self, chunk):
        return chunk if chunk.data % 2 else None


@placed
@pytest.mark.parametrize("operator", [Forgets, Counts])
def test_an_operator_that_forgets_to_return_is_told_so(operator, placement):
    graph, node = numbers()
    node.then(operator(), name="forgets", **placement)
    with graph.loader() as loader, pytest.raises(TypeError) as caught:
        list(loader)
    assert str(caught.value) == (
        "stage 'forgets': process must return a Chunk, got None: return the chunk, or declare one_to_one = False on "
        f"{operator.__name__} if it drops some"
    )


@placed
def test_an_operator_that_drops_says_so(placement):
    graph, node = numbers()
    node.then(Drops(), **placement)
    with graph.loader() as loader:
        assert sorted(loader) == [1, 3, 5, 7]


def test_a_policy_that_a_source_in_sequence_cannot_keep_is_refused():
    for policy in (pg.Retry(2), pg.Retry(2, then=pg.Skip()), pg.Skip()):
        graph, _ = numbers(on_error=policy)
        with pytest.raises(pg.errors.GraphError, match="needs a random-access source"):
            graph.plan()


async def twice(x):
    await asyncio.sleep(0)
    return 2 * x


async def twice_drawn(x, rng):
    return await twice(x)


@placed
@pytest.mark.parametrize(
    "function", [lambda x: twice(x), lambda x, rng: twice_drawn(x, rng)], ids=["plain", "with rng"]
)
def test_a_lambda_around_an_async_function_says_what_to_give_instead(function, placement):
    for batch in (False, True):
        graph, node = numbers()
        node = node.then(function, name="wrapped", **placement)
        if batch:
            node.then(ops.Batch(2))
        with (
            graph.loader() as loader,
            pytest.raises(TypeError, match="returned a coroutine: pass the async function"),
        ):
            list(loader)


def test_a_filter_or_flat_map_of_coroutines_says_so_too():
    collated = ops.Batch(2, collate=lambda items: twice(items[0]))
    for operator in (ops.Filter(lambda x: twice(x)), ops.FlatMap(lambda x: twice(x)), collated):
        graph, node = numbers()
        node.then(operator)
        with graph.loader() as loader, pytest.raises(TypeError, match="returned a coroutine"):
            list(loader)


def test_a_data_set_whose_getitem_is_async_is_refused_with_the_way():
    class Remote(list):
        async def __getitem__(self, index):
            return await twice(index)

    items = Remote(range(5))
    with pytest.raises(
        pg.errors.GraphError, match=r"Remote.__getitem__ is async.*\.then\(dataset.__getitem__"
    ):
        ops.FromSequence(items)
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(len(items)))).then(items.__getitem__, workers=3)
    with graph.loader() as loader:
        assert list(loader) == [0, 2, 4, 6, 8]


def bumped(sample):
    sample["n"] += 1
    sample["seen"].append(1)
    return sample


def again(sample):
    for view in range(3):
        sample["view"] = view
        yield sample


@placed
@pytest.mark.parametrize("function", [lambda sample: [sample] * 3, again], ids=["several times", "changed"])
def test_an_object_that_a_flat_map_gives_again_is_each_time_one_of_its_own(function, placement):
    graph = pg.Graph("g")
    samples = [{"n": n, "seen": [], "view": None} for n in range(5)]
    node = graph.add(ops.FromSequence(samples)).then(ops.FlatMap(function), **placement)
    node.then(bumped, **placement)
    with graph.loader() as loader:
        found = sorted(loader, key=lambda sample: sample["n"])  # in no order, where the stage has none
    assert [sample["n"] for sample in found] == [n + 1 for n in range(5) for _ in range(3)]
    assert all(sample["seen"] == [1] for sample in found)
    views = [sample["view"] for sample in found]
    assert function is not again or all(sorted(views[n : n + 3]) == [0, 1, 2] for n in range(0, 15, 3))


def test_a_mapping_is_refused_where_it_would_be_read_by_position():
    with pytest.raises(
        pg.errors.GraphError, match=r"a dict is not read by position; give list\(mapping.values"
    ):
        ops.FromSequence({"a": 1, "b": 2})
    graph = pg.Graph("g")
    graph.add(ops.FromSequence({"a": 1, "b": 2}, sampler=["b", "a"]))
    with graph.loader() as loader:
        assert list(loader) == [2, 1]


class Fields(dict):
    """A mapping of a user's own, such as transformers' BatchEncoding."""


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, Fields])
def test_a_batch_of_mappings_is_a_mapping_of_their_kind(kind):
    graph = pg.Graph("mappings")
    source = graph.add(ops.FromIterable(lambda: [kind(b=1, a=2), kind(b=3, a=4)]))
    source.then(ops.Batch(2), name="batch")
    with graph.loader() as loader:
        (batch,) = loader
    assert type(batch) is kind and list(batch) == ["b", "a"]
    assert batch["b"].tolist() == [1, 3] and batch["a"].tolist() == [2, 4]
    source.then(ops.Batch(2), name="again").then(ops.Unbatch(), name="rows")
    with graph.loader("rows") as loader:
        rows = list(loader)
    assert [type(row) for row in rows] == [kind, kind] and [int(row["b"]) for row in rows] == [1, 3]


@pytest.mark.parametrize("name", ["a.tar.xz", "b.tbz2", "d.tar.bz2"])
def test_a_compressed_archive_is_refused_with_the_way_out(name, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    graph = pg.Graph("packed")
    graph.add(ops.ShardSelect(str(tmp_path / name))).then(ops.Load())
    with (
        graph.loader() as loader,
        pytest.raises(pg.errors.DataError, match="in no other packing: decompress it"),
    ):
        list(loader)


class Backwards(pg.Source):
    """Its positions are not those of the strided order."""

    random_access = True

    def length(self, epoch, rank, world_size):
        return 12

    def positions(self, epoch, rank, world_size, start):
        return iter(range(11 - start, -1, -1))

    def read(self, position, epoch):
        return position


class BackwardsInSequence(Backwards):
    random_access = False

    def iterate(self, epoch, rank, world_size, start):
        for position in self.positions(epoch, rank, world_size, start):
            yield position, position


class Declared(BackwardsInSequence):
    def positions_of(self, steps, epoch, rank, world_size):
        return [11 - step for step in steps]


def below_completion_order(source):
    graph = pg.Graph("backwards")
    gate = Gate()
    graph.add(source, name="source", capacity=12).then(gate, workers=2, ordered=False)
    return graph, gate


@pytest.mark.parametrize("source", [Backwards, Declared])
def test_a_state_below_completion_order_knows_the_positions_of_a_users_source(source, monkeypatch):
    monkeypatch.setattr(delivered, "FORGET_EVERY", 11)  # at the last delivery below
    graph, gate = below_completion_order(source())
    got = []
    with graph.loader() as loader:
        passing = iter(loader)
        for position in (11, 10, 9, 7, 6, 5, 4, 3, 2, 1, 0):  # 8 waits all the while
            gate.release_position(position)
            got.append(next(passing))
        state = json.loads(json.dumps(loader.state_dict()))
        gate.release_all()
    graph, gate = below_completion_order(source())
    gate.release_all()
    with graph.loader() as loader:
        loader.load_state_dict(state)
        got += list(loader)
    assert sorted(got) == list(range(12))


def test_positions_of_iterate_that_a_state_would_not_know_are_found():
    def make():
        graph = pg.Graph("backwards")
        graph.add(BackwardsInSequence(), name="source").then(abs, workers=2, ordered=False)
        return graph

    with pytest.raises(
        AssertionError, match="'source': positions_of says other positions than iterate yields"
    ):
        pg.testing.assert_resumes_exactly(make)
