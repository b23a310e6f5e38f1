"""A user's function that forks, and returns in the child too."""

import os
import signal
import threading

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

    def __init__(self, raises=False):
        self.raises = raises

    def __call__(self, x):
        if x != 3:
            return x
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # one that hangs fails the test, and does not stop it
            if self.raises:
                raise ValueError("child")
            return "child"
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_the_child_ends_and_its_result_is_in_no_place(backend, raises, capfd):
    graph = pg.Graph("stray")
    graph.add(ops.FromIterable(range(10))).then(
        Forks(raises), backend=backend, name="forks", workers=2, on_error=pg.Skip()
    )
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2, 1, 4, 5, 6, 7, 8, 9]
    if backend == "thread":
        assert "stage 'forks': its function forked and returned in the child too" in capfd.readouterr().err


@pytest.mark.parametrize("held", ["unit", "account"])
def test_the_child_waits_for_no_lock_that_another_thread_of_the_parent_held(held):
    holds, let_go = threading.Event(), threading.Event()

    def hold(lock):
        with lock:
            holds.set()
            assert let_go.wait(60)

    def fork(x):
        if x != 3:
            return x
        run = loader._runtime.run
        (unit,) = [each() for each in run.stages["forks"].sender.units]
        locks = {"unit": unit._lock, "account": run.account._lock}
        holder = threading.Thread(target=hold, args=(locks[held],), daemon=True)
        holder.start()
        assert holds.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            return "child"
        let_go.set()
        holder.join(60)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    graph = pg.Graph("stray")
    graph.add(ops.FromIterable(range(10))).then(fork, name="forks")
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2, 1, 4, 5, 6, 7, 8, 9]
