"""Items that a process has made reach the training loop while the function that makes the next one waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.process.process_host import ProcessLink
from pipegraph.engine.remote.worker import PULL

ROOT = Path(__file__).parents[2]
BURSTS = [1, 1, 2, 5, 1, 3, PULL - 13, 1, PULL, 2, 3 * PULL + 1, 1, 4]


class Counted:
    """Bursts of numbers; before each burst, waits until the consumer has had all before. Has a state of its own."""

    def __init__(self, path, bursts=tuple(BURSTS)):
        self.path, self.bursts, self.at = path, bursts, 0

    def __iter__(self):
        number = 0
        with open(self.path, "rb", buffering=0) as had:
            for burst in self.bursts:
                for _ in range(burst):
                    self.at = number + 1
                    yield number
                    number += 1
                seen = 0
                while seen < burst:
                    seen += len(had.read(burst - seen))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        raise AssertionError


def source(path):
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(Counted(path)), name="made", backend="process")
    return graph


def children(path):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence([path])).then(ops.FlatMap(Counted), name="made", backend="process")
    return graph


@pytest.mark.parametrize("make", [source, children])
def test_a_process_that_waits_for_the_consumer_of_what_it_has_made_goes_on(make, tmp_path):
    path = str(tmp_path / "had")
    os.mkfifo(path)
    found, snapshots = [], []
    with make(path).loader() as loader:
        passing = iter(loader)
        with open(path, "wb", buffering=0) as had:
            for item in passing:
                found.append(item)
                snapshots.append(loader.state_dict()["rank0"]["iterators"].get("made"))
                had.write(b".")
    assert found == list(range(sum(BURSTS)))
    if make is source:  # answers that were sent early change nothing about the iterator's own states
        for snapshot in filter(None, snapshots):
            step, state = snapshot
            expected = {"at": step} if step else {"start": {"at": 0}, "first": {"at": 1}}
            assert state == expected and not step % PULL
        assert snapshots[-1][0] == len(found) // PULL * PULL


def test_a_process_that_ends_after_an_early_answer_loses_and_doubles_nothing(tmp_path):
    path, ended = str(tmp_path / "had"), tmp_path / "ended"
    os.mkfifo(path)

    def items():
        yield from range(3)
        if not ended.exists():
            with open(path, "rb"):  # once the consumer has had these
                ended.touch()
                os._exit(1)
        yield from range(3, 200)

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(items), backend="process")
    with graph.loader() as loader:
        passing = iter(loader)
        found = [next(passing) for _ in range(3)]
        with open(path, "wb"):
            assert [*found, *passing] == list(range(200))


HURRIED_AT_ONCE = """
import os, pathlib, sys
from pipegraph.engine.process import process_host, worker_life
from tests.process import test_early_answers as tests

folder = pathlib.Path(sys.argv[1])
os.mkfifo(folder / "hurried")
answer, hurry, opened = worker_life.answer, process_host.ProcessLink.hurry, []

def answered(port, result, *about):
    answer(port, result, *about)
    if not opened:  # the worker's start: it gets no further until the trainer has asked it to hurry
        opened.append(True)
        open(folder / "hurried").read()

def hurrying(link):
    hurry(link)
    if not opened:
        opened.append(True)
        open(folder / "hurried", "w").close()

worker_life.answer, process_host.ProcessLink.hurry = answered, hurrying
tests.test_a_process_that_waits_for_the_consumer_of_what_it_has_made_goes_on(tests.children, folder)
"""


def test_a_process_that_is_asked_to_hurry_as_it_has_just_started_does(tmp_path):
    # In a trainer without threads, whose worker processes are its forks and so have these functions.
    done = subprocess.run(
        [sys.executable, "-c", HURRIED_AT_ONCE, str(tmp_path)], cwd=ROOT, timeout=100, check=False
    )
    assert done.returncode == 0


def test_a_request_to_hurry_that_is_lost_is_repeated(monkeypatch, tmp_path):
    """Python runs a signal's handler between two of its instructions: not within a call that began just before."""
    hurry, lost = ProcessLink.hurry, []

    def hurried(link):
        if lost:
            hurry(link)
        lost.append(link)

    monkeypatch.setattr(ProcessLink, "hurry", hurried)
    test_a_process_that_waits_for_the_consumer_of_what_it_has_made_goes_on(children, tmp_path)
    assert len(lost) > 1
