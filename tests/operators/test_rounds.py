"""``Repeat``, ``Take`` and ``Mix`` where a source ends: what is delivered, and exact resume."""

import itertools
from collections import Counter

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("no_leaks")


def items_of(graph, epochs=1, **options):
    with graph.loader(epochs=epochs, **options) as loader:
        passes = [list(loader) for _ in range(epochs)]
    return passes[0] if epochs == 1 else passes


def numbers(epoch):
    """A stream without a length, of another one in each epoch."""
    yield from (1000 * (epoch % 7) + i for i in range(5))


SOURCES = {
    "sequence": lambda: ops.FromSequence(range(7), shuffle=True),
    "list": lambda: ops.FromIterable(list(range(7))),
    "stream": lambda: ops.FromIterable(numbers),
    "sampler": lambda: ops.FromSequence(range(7), sampler=[3, 1, 1, 6]),
}


# -- Repeat ------------------------------------------------------------------------------------------


def repeated(kind, times=3, *behind):
    def make():
        graph = pg.Graph("g", seed=4)
        node = graph.add(SOURCES[kind](), name="source").then(lambda x: x, workers=2).then(ops.Repeat(times))
        for operator in behind:
            node = node.then(operator)
        return graph

    return make


class Curriculum(pg.Source):
    """Grows with the epoch."""

    def iterate(self, epoch, rank, world_size, start):
        yield from ((number, epoch) for number in range(start, self.length(epoch, rank, world_size)))

    def length(self, epoch, rank, world_size):
        return epoch + 1

    def index_of(self, position, epoch):
        return (position, epoch)


@pytest.mark.parametrize("source", [Curriculum(), ops.FromIterable(lambda epoch: [epoch] * (epoch + 1))])
def test_rounds_are_the_epochs_of_the_source_one_after_the_other(source):
    graph = pg.Graph("g")
    graph.add(source).then(ops.Repeat(2))
    with graph.loader(epochs=2) as loader:
        assert [list(loader) for _ in range(2)] == [[0, 1, 1], [2, 2, 2, 3, 3, 3, 3]]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_repeated_stream_gives_each_item_so_often_and_resumes_exactly(kind):
    found = Counter(items_of(repeated(kind)()))
    if kind == "stream":
        assert found == Counter(x for number in range(3) for x in numbers(number))
    else:
        assert found == Counter(3 * items_of(repeated(kind, 1)()))
    assert_resumes_exactly(repeated(kind, 2, ops.Batch(2, collate=list)))


def test_each_round_has_its_own_order_and_the_first_is_the_epochs():
    found = items_of(repeated("sequence")())
    rounds = [found[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(each) == list(range(7)) for each in rounds) and rounds[0] != rounds[1] != rounds[2]
    assert rounds[0] == items_of(repeated("sequence", 1)())
    first, second = items_of(repeated("sequence")(), epochs=2)
    assert first == found and second != found


# -- Take --------------------------------------------------------------------------------------------


def taken(count, endless=False, *behind):
    def make():
        graph = pg.Graph("g", seed=4)
        items = itertools.count if endless else (lambda: range(10))
        node = graph.add(ops.FromIterable(items)).then(lambda x, rng: (x, rng.integers(99)), workers=2)
        for operator in (ops.Take(count), *behind):
            node = node.then(operator)
        return graph

    return make


def test_take_ends_an_epoch_also_of_an_endless_stream():
    assert [x for x, _ in items_of(taken(4)())] == [0, 1, 2, 3]
    assert len(items_of(taken(20)())) == 10 and items_of(taken(0)()) == []
    first, second = items_of(taken(3, True)(), epochs=2)
    assert [x for x, _ in first] == [x for x, _ in second] == [0, 1, 2] and first != second
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(10))).then(ops.Batch(3, collate=list)).then(ops.Take(2))
    with graph.loader() as loader:
        assert len(loader) == 2 and list(loader) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("count", [0, 4])
def test_take_resumes_exactly(count):
    assert_resumes_exactly(taken(count))
    assert_resumes_exactly(taken(count, True, ops.Shuffle(3)))


# -- Mix(stop="repeat") --------------------------------------------------------------------------------


def mixed(*kinds, stop="repeat", behind=()):
    def make():
        graph = pg.Graph("g", seed=4)
        nodes = []
        for number, kind in enumerate(kinds):
            node = graph.add(SOURCES[kind](), name=f"s{number}").then(lambda x, n=number: (n, x))
            for operator in behind:
                node = node.then(operator)
            nodes.append(node)
        graph.add(ops.Mix([1.0 + i for i in range(len(kinds))], stop=stop), *nodes, name="mix")
        return graph

    return make


def test_all_inputs_come_whole_and_the_shorter_ones_again():
    found = items_of(mixed("sequence", "stream", "list")())
    counts = Counter(found)
    for number, kind in enumerate(("sequence", "stream", "list")):
        mine = [x for n, x in found if n == number]
        first = items_of(repeated(kind, 1)())
        assert mine[: len(first)] == first
    assert len(found) > 7 + 5 + 7 and max(counts.values()) >= 2
    whole = items_of(mixed("sequence", "stream", "list", stop="all")())
    assert found[:5] == whole[:5]  # the draws are the same until one ends


@pytest.mark.parametrize("kinds", [("sequence", "stream"), ("list", "sampler"), ("list",)])
def test_a_repeating_mixture_resumes_exactly(kinds):
    assert_resumes_exactly(mixed(*kinds))
