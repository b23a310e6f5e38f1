"""``Cache`` below sources and operators of a user's own: what they must declare, and what is then delivered."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError
from pipegraph.operators import cache

pytestmark = pytest.mark.usefixtures("no_leaks")


class Shuffled(pg.Source):
    """0, 10 ... in a new order in each epoch, written as the documentation shows it."""

    random_access = True
    order = pg.order.StridedOrder()

    def __init__(self, n):
        self.n = n

    def length(self, epoch, rank, world_size):
        return self.order.length(self.n, world_size)

    def positions(self, epoch, rank, world_size, start):
        return iter(self.order.positions(self.n, 0, epoch, rank, world_size, start).tolist())

    def read(self, position, epoch):
        return 10 * int(self.order.samples_at(self.n, np.array([position]), 0, epoch)[0])


class Identified(Shuffled):
    def index_of(self, position, epoch):
        return int(self.order.samples_at(self.n, np.array([position]), 0, epoch)[0])


class Named(Identified):
    """Its samples are known by names."""

    def index_of(self, position, epoch):
        return f"row {super().index_of(position, epoch)}"


def cached(source, *operators, where="memory"):
    graph = pg.Graph("cached")
    node = graph.add(source, name="source")
    for operator in operators:
        node = node.then(operator, name="work")
    node.then(ops.Cache(where, "1 MB"), name="cache")
    return graph


def epochs_of(graph, count=3):
    with graph.loader(epochs=count) as loader:
        return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("source", [Shuffled(20), "repeated"])
def test_a_source_that_does_not_identify_its_samples_is_refused_above_a_cache(source):
    if source == "repeated":
        graph = pg.Graph("cached")
        graph.add(Shuffled(20), name="source").then(ops.Repeat(2)).then(ops.Cache("memory", "1 MB"))
    else:
        graph = cached(source)
    with pytest.raises(GraphError, match=r"'source' \(shuffled\).*define index_of\(position, epoch\)"):
        graph.plan()


class Unnamed(Identified):
    def index_of(self, position, epoch):
        return {"row": super().index_of(position, epoch)}


@pytest.mark.parametrize("source", [Identified, Named])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_source_that_identifies_its_samples_delivers_its_own_order_in_every_epoch(source, where, tmp_path):
    plain = pg.Graph("cached")
    plain.add(source(20), name="source")
    expected = epochs_of(plain)
    assert expected[0] != expected[1]
    where = where if where == "memory" else tmp_path
    assert epochs_of(cached(source(20), where=where)) == expected


def test_an_index_that_no_cache_can_keep_is_refused():
    with pytest.raises(GraphError, match=r"an int, a str, or a tuple of these; got \{'row'"):
        epochs_of(cached(Unnamed(20)))


class Stamps(pg.Operator):
    """Adds the epoch and the position of its sample."""

    def process(self, chunk):
        chunk.data = (chunk.data, chunk.epoch, int(chunk.positions[0]))
        return chunk


class Honest(Stamps):
    depends_on = "item|place|epoch"


class Doubles(pg.Operator):
    depends_on = "item"

    def process(self, chunk):
        chunk.data = 2 * chunk.data
        return chunk


def test_an_operator_that_does_not_say_what_it_depends_on_is_refused_above_a_cache():
    with pytest.raises(GraphError, match=r"'work' \(stamps\) does not declare .*depends_on = \"item\""):
        cached(Identified(20), Stamps()).plan()
    with pytest.raises(
        GraphError, match=r"'work' \(honest\) depends on its place and epoch, which every epoch changes"
    ):
        cached(Identified(20), Honest()).plan()


def test_an_operator_that_depends_on_its_item_alone_may_be_above_a_cache():
    first, second = epochs_of(cached(Identified(20), Doubles()), 2)
    assert sorted(first) == sorted(second) == [20 * n for n in range(20)]
    assert first != second


def test_an_unknown_word_is_refused_with_those_there_are():
    class Typo(Doubles):
        depends_on = "items"

    with pytest.raises(GraphError, match=r"depends_on.*'items'.*item, place, epoch, random"):
        cached(Identified(20), Typo()).plan()


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ma.array([1, 2], mask=[True, False]),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.quint8),
    ],
    ids=["masked", "parameter", "quantised"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of what it deprecates
def test_what_a_folder_would_change_is_refused(make, tmp_path):
    graph = pg.Graph("cached")
    source = graph.add(ops.FromSequence(range(2)))
    source.then(lambda x: make(), name="work").then(ops.Cache(tmp_path, "1 MB"), name="cache")
    with pytest.raises(DataError, match="cannot be kept in a folder; use where='memory'"):
        epochs_of(graph, 1)


def test_a_value_that_two_threads_keep_at_once_counts_once(monkeypatch):
    both, own = threading.Barrier(2), cache.own_memory

    def together(leaf):
        both.wait(60)
        return own(leaf)

    monkeypatch.setattr(cache, "own_memory", together)
    memory, value = (
        cache._Memory(10 * 864),
        (None, np.zeros(100)),
    )  # 64 bytes are for what lies beside the array
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: memory.put("stages", 0, value), range(2)))
    monkeypatch.undo()
    for index in range(1, 11):
        memory.put("stages", index, value)
    assert [memory.get("stages", index) is not None for index in (0, 9, 10)] == [True, True, False]
