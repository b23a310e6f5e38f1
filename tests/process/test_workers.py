"""Stages whose operators live in processes: what users write, and what goes wrong with it."""

import ctypes
import itertools
import os
import select
import signal
import sqlite3
import threading

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import StageTimeoutError, WorkerDiedError
from tests.process.process_pipelines import delivered, pipeline, tell_that_it_hangs

__all__ = ["tell_that_it_hangs"]

pytestmark = pytest.mark.usefixtures("no_leaks")


class Lazy(torch.utils.data.Dataset):
    """As people write it: the connection is opened at first use and kept."""

    def __init__(self, path):
        self.path = path
        self.db = None

    def __len__(self):
        return 50

    def __getitem__(self, i):
        if self.db is None:
            self.db = sqlite3.connect(self.path)
        return self.db.execute("select y from t where x = ?", (i,)).fetchone()[0]


def test_a_data_set_with_a_lazy_handle_has_one_in_each_process(tmp_path):
    path = str(tmp_path / "data.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("create table t (x int, y int)")
        db.executemany("insert into t values (?, ?)", [(x, x * x) for x in range(50)])
    db.close()
    graph = pg.Graph("g")
    source = graph.add(ops.FromSequence(Lazy(path)), workers=3, backend="process")
    source.then(ops.Batch(7))
    with graph.loader(epochs=2) as one, graph.loader() as two:
        for loader in (one, two, one):
            assert torch.cat(list(loader)).tolist() == [x * x for x in range(50)]


def test_the_workers_traceback_is_told():
    def work(x):
        raise ValueError("deep down")

    with pytest.raises(ValueError, match="deep down") as caught:
        delivered(pipeline(work))
    assert "in work" in str(caught.value.__cause__)
    assert any("stage 'work', sample 0" in note for note in caught.value.__notes__)


# -- deaths ----------------------------------------------------------------------------------------


def exits(x):
    if x == 5:
        os._exit(3)
    return x


def faults(x):
    if x == 5:
        ctypes.string_at(0)
    return x


def killed(x):
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_a_process_that_is_killed_while_it_has_nothing_to_do_costs_no_sample():
    ended = threading.Event()

    def numbers():
        yield 0
        ended.wait()
        yield from (1, 2)

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(numbers)).then(lambda x: (x, os.getpid()), backend="process")
    with graph.loader() as loader:
        passing = iter(loader)
        _, pid = next(passing)
        end = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([end], [], [])
        os.close(end)
        ended.set()
        assert [number for number, _ in passing] == [1, 2]


DEATHS = [(exits, r"called exit\(3\)"), (faults, "SIGSEGV"), (killed, "SIGKILL")]


@pytest.mark.parametrize(("fn", "reason"), DEATHS, ids=["exit", "segfault", "kill"])
@pytest.mark.parametrize("batched", [False, True], ids=["rows alone", "rows in bundles"])
def test_a_sample_that_ends_its_process_twice_is_blamed(fn, reason, batched):
    def make(policy):
        graph = pipeline(fn, on_error=policy)
        if batched:
            graph.add(ops.Batch(4, collate=list), graph.tail)
        return graph

    with make("raise").loader() as loader, pytest.raises(WorkerDiedError, match=f"stage 'work'.*{reason}"):
        list(loader)
    with make(pg.Skip(1)).loader() as loader:
        found = list(loader)
        assert ([*itertools.chain(*found)] if batched else found) == [x for x in range(20) if x != 5]
        (quarantined,) = loader.profile().quarantined
    assert quarantined.key == 5
    assert quarantined.stage == "work"


class Counting(pg.Operator):
    kind = "map"

    def __init__(self):
        self.count = 0

    def process(self, chunk):
        self.count += 1
        if self.count == 5:
            os._exit(1)
        return chunk

    def state_dict(self):
        return self.count

    def load_state_dict(self, state):
        self.count = state


def test_a_death_takes_what_an_operator_held_and_ends_the_run():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(30))).then(Counting(), name="work", backend="process")
    with pytest.raises(WorkerDiedError) as caught:
        delivered(graph)
    assert any("resume from a state" in note for note in caught.value.__notes__)


# -- deadlines -------------------------------------------------------------------------------------


def hangs(tell=lambda: None):
    tell()  # in here: who is told may look at the stack at once
    threading.Event().wait()


def hangs_in_c(tell):
    tell()
    ctypes.PyDLL(None).pause()  # with the GIL


@pytest.mark.parametrize("hang", [hangs, hangs_in_c])
@pytest.mark.parametrize("batched", [False, True], ids=["rows alone", "rows in bundles"])
def test_a_sample_that_takes_too_long_is_named_with_its_stack_and_can_be_skipped(
    hang, batched, tell_that_it_hangs
):
    def work(x):
        if x == 5:
            hang(tell_that_it_hangs)
        return x

    def make(policy):
        graph = pipeline(work, on_error=policy, timeout=0.5)
        if batched:
            graph.add(ops.Batch(4, collate=list), graph.tail)
        return graph

    with make("raise").loader() as loader:
        with pytest.raises(StageTimeoutError, match=r"stage 'work'.*timeout=0.5 s") as caught:
            list(loader)
        assert any(f"in {hang.__name__}" in note for note in caught.value.__notes__)
    with make(pg.Skip(1)).loader() as loader:
        found = list(loader)
        assert ([*itertools.chain(*found)] if batched else found) == [x for x in range(20) if x != 5]
        assert [each.key for each in loader.profile().quarantined] == [5]


# -- the end ---------------------------------------------------------------------------------------


SCRIPT = """
import os, sys, threading
import pipegraph as pg
from pipegraph import operators as ops

def work(x):
    if x == 3:
        print(os.getpid(), os.getppid(), flush=True)
        threading.Event().wait()
    return x

graph = pg.Graph("g")
graph.add(ops.FromSequence(range(10))).then(work, workers=2, backend="process")
{threads}
for x in graph.loader():
    pass
"""


def test_ctrl_c_ends_the_trainer_and_its_processes(programs):
    trainer = programs.start(SCRIPT.format(threads=""), start_new_session=True)
    worker, _ = map(int, trainer.readline().split())
    end = os.pidfd_open(worker)
    trainer.interrupt(group=True)
    _, errors = trainer.communicate()
    assert "KeyboardInterrupt" in errors
    assert select.select([end], [], [], 60)[0]
    os.close(end)
