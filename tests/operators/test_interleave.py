"""Interleave: the items of many files in turn."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly


class Files:
    """Files of numbers that know whether they are open."""

    def __init__(self):
        self.open = self.most = 0

    def __call__(self, file):
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            yield from ((file, i) for i in range(file))
        finally:
            self.open -= 1


def interleaved(files=(3, 0, 7, 2, 5, 1, 4), cycle=3, opener=range, **options):
    def make():
        graph = pg.Graph("g", seed=4)
        graph.add(ops.Interleave(list(files), opener, cycle, **options)).then(
            lambda x, rng: (x, int(rng.integers(99)))
        )
        return graph

    return make


def test_files_are_read_in_turn_and_closed():
    files = Files()
    graph = pg.Graph("g")
    graph.add(ops.Interleave([2, 1, 3, 2], files, cycle=2))
    with graph.loader() as loader:
        found = list(loader)
    assert found == [(2, 0), (1, 0), (2, 1), (3, 0), (2, 0), (3, 1), (2, 1), (3, 2)]
    assert files.most == 2 and files.open == 0
    with graph.loader() as loader:
        assert next(iter(loader)) == (2, 0)
    assert files.open == 0


@pytest.mark.parametrize("cycle", [2, 9])
@pytest.mark.parametrize("shuffle", [False, True])
def test_interleaving_resumes_exactly(cycle, shuffle):
    assert_resumes_exactly(interleaved(cycle=cycle, shuffle=shuffle), epochs=2 if cycle == 2 else 1)
