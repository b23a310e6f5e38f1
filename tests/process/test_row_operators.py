"""What a ``RowOperator`` does to a batch at once, and how that fails, is the same in threads and in processes."""

import os

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import RowOperator
from pipegraph.errors import WorkerDiedError

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.parametrize("backend", ["thread", "process"]),
]


class Rows(RowOperator):
    def process(self, chunk):
        return chunk

    def begin_batch(self, chunk):
        return chunk, [None] * len(chunk.data)

    def do_row(self, batch, index):
        batch[1][index] = batch[0].data[index]

    def end_batch(self, batch, kept):
        return batch[0].select(kept, [batch[1][row] for row in kept])


class AtOnce(Rows):
    def do_rows(self, batch, first, stop):
        batch[1][first:stop] = [x * 2 for x in batch[0].data[first:stop]]

    def do_row(self, batch, index):
        pass


class FailsAtOnce(Rows):
    def do_rows(self, batch, first, stop):
        if 2 in batch[0].data[first:stop]:
            raise ValueError("row")

    def do_row(self, batch, index):
        if batch[0].data[index] == 2:
            raise ValueError("row")
        super().do_row(batch, index)


class FailsToBegin(Rows):
    def begin_batch(self, chunk):
        if 2 in chunk.data:
            raise ValueError("of the batch")
        return super().begin_batch(chunk)


def outcome(operator, backend):
    graph = pg.Graph("g", seed=1)
    batches = graph.add(ops.FromIterable(range(8))).then(ops.Batch(4, collate=list))
    batches.then(operator, name="work", backend=backend, workers=1, on_error=pg.Skip(4))
    with graph.loader() as loader:
        return list(loader), [(each.key, each.error) for each in loader.profile().quarantined]


def test_rows_are_done_at_once(backend):
    assert outcome(AtOnce(), backend) == ([[0, 2, 4, 6], [8, 10, 12, 14]], [])


def test_a_row_that_fails_at_once_is_found(backend):
    assert outcome(FailsAtOnce(), backend) == ([[0, 1, 3], [4, 5, 6, 7]], [(2, "ValueError: row")])


def test_a_batch_that_cannot_begin_fails_with_its_own_error(backend):
    found, lost = outcome(FailsToBegin(), backend)
    assert found == [[4, 5, 6, 7]]
    assert lost == [(key, "ValueError: of the batch") for key in range(4)]


class DiesAtOnce(FailsAtOnce):
    def do_rows(self, batch, first, stop):
        for index in range(first, stop):
            self.do_row(batch, index)

    def do_row(self, batch, index):
        if batch[0].data[index] == 6:
            os._exit(3)


def test_a_death_among_rows_that_are_done_at_once_is_that_rows(backend):
    if backend == "process":
        found, ((key, error),) = outcome(DiesAtOnce(), backend)
        assert [len(each) for each in found] == [4, 3]
        assert (key, error.split(":")[0]) == (6, WorkerDiedError.__name__)
