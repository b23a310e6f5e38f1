"""A user's function that forks, and returns in the child too."""

import os

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import no_leaks

__all__ = ["no_leaks"]

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


class Forks:
    """Forks at the third item; its parent notes the child's exit status."""

    def __call__(self, x):
        if x != 3:
            return x
        child = os.fork()
        if child == 0:
            return "child"
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_the_child_ends_and_its_result_is_in_no_place(backend, capfd):
    graph = pg.Graph("stray")
    graph.add(ops.FromIterable(range(10))).then(Forks(), backend=backend, name="forks", workers=2)
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2, 1, 4, 5, 6, 7, 8, 9]
    if backend == "thread":
        assert "stage 'forks': its function forked and returned in the child too" in capfd.readouterr().err
