"""A user's SystemExit, KeyboardInterrupt, ... is raised where any other error of the same item would be."""

import asyncio

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import RowOperator

pytestmark = pytest.mark.usefixtures("no_leaks")

PLACEMENTS = [
    {"backend": "thread"},
    {"backend": "process"},
]
KINDS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]


class Rows(RowOperator):
    def __init__(self, error):
        self.error = error

    def process(self, chunk):
        raise NotImplementedError

    def begin_batch(self, chunk):
        return chunk

    def do_row(self, batch, index):
        if batch.data[index] == 5:
            raise self.error("at 5")

    def end_batch(self, batch, kept):
        return batch


class Held(pg.Regroup):
    def __init__(self, error):
        self.error = error

    def begin(self):
        pass

    def process(self, chunk):
        return [chunk]

    def flush(self):
        raise self.error("at the end")


class Work:
    """Functions that fail at 5."""

    def __init__(self, error):
        self.error = error

    def map(self, x):
        if x == 5:
            raise self.error("at 5")
        return x

    def items(self):
        return map(self.map, range(8))

    def children(self, x):
        for index in range(3):
            yield self.map(x) * 3 + index
            if x == 4 and index == 1:
                raise self.error("in the middle")

    def collate(self, rows):
        return list(map(self.map, rows))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.map(index)


STAGES = {
    "sequence": lambda error: ops.FromSequence(Work(error)),
    "iterable": lambda error: ops.FromIterable(Work(error).items),
    "map": lambda error: ops.Map(Work(error).map),
    "filter": lambda error: ops.Filter(Work(error).map),
    "flat_map": lambda error: ops.FlatMap(Work(error).children),
    "batch": lambda error: ops.Batch(2, collate=Work(error).collate),
    "rows": Rows,
    "regroup": Held,
}


def outcome(make, error, placement):
    operator = make(error)
    graph = pg.Graph("g")
    if isinstance(operator, pg.Source):
        node = graph.add(operator, name="work", **placement)
    else:
        node = graph.add(ops.FromSequence(range(80)))
        if make is Rows:
            node = node.then(ops.Batch(2, collate=list))
        node = node.then(operator, name="work", **placement)
    node.then(Same(), name="below", **placement)
    found = []
    with graph.loader() as loader, pytest.raises(error) as caught:
        for item in loader:
            found.append(item)
    return found, str(caught.value), caught.value.__notes__


class Same:
    def __call__(self, x):
        return x


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_raised_at_its_items_place_after_what_came_before(stage, placement):
    expected = outcome(STAGES[stage], ValueError, placement)
    assert expected[0]
    for error in KINDS if stage == "iterable" else KINDS[:1]:
        assert outcome(STAGES[stage], error, placement) == expected
    if stage != "batch":  # whose error names the batch only in the trainer
        assert expected == outcome(STAGES[stage], ValueError, PLACEMENTS[0])
