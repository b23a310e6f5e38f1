"""``Cache`` below sources and operators of a user's own: what they must declare, and what is then delivered."""

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError

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


def cached(source, *operators):
    graph = pg.Graph("cached")
    node = graph.add(source, name="source")
    for operator in operators:
        node = node.then(operator, name="work")
    node.then(ops.Cache("1 MB"), name="cache")
    return graph


def test_a_source_that_does_not_identify_its_samples_is_refused_above_a_cache():
    with pytest.raises(GraphError, match=r"'source' \(shuffled\).*define index_of\(position, epoch\)"):
        cached(Shuffled(20)).plan()


class Stamps(pg.Operator):
    """Adds the epoch and the position of its sample."""

    def process(self, chunk):
        chunk.data = (chunk.data, chunk.epoch, int(chunk.positions[0]))
        return chunk


class Honest(Stamps):
    depends_on = "item|place|epoch"


def test_an_operator_that_does_not_say_what_it_depends_on_is_refused_above_a_cache():
    with pytest.raises(GraphError, match=r"'work' \(stamps\) does not declare .*depends_on = \"item\""):
        cached(Identified(20), Stamps()).plan()
    with pytest.raises(
        GraphError, match=r"'work' \(honest\) depends on its place and epoch, which every epoch changes"
    ):
        cached(Identified(20), Honest()).plan()
