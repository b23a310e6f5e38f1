"""What goes wrong between the trainer and its worker processes, and costs no more than the item it happened to."""

import os
import select
import signal
import subprocess
import threading

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.process import zygote
from pipegraph.errors import WorkerDiedError
from tests.process.process_pipelines import delivered, pipeline

pytestmark = pytest.mark.usefixtures("no_leaks")


class OnlyHere:
    """Can be written, but not read in the other process."""

    def __init__(self, where):
        self.where = where

    def __reduce__(self):
        return refuse, (self.where,)


def refuse(where):
    raise LookupError(f"not in {where}")


@pytest.mark.parametrize("batched", [False, True], ids=["rows alone", "rows in bundles"])
def test_a_result_that_cannot_be_read_in_the_trainer_is_the_items_own_error(batched):
    graph = pipeline(lambda x: OnlyHere("the trainer") if x == 3 else x, on_error=pg.Skip(4))
    if batched:
        graph.add(ops.Batch(4, collate=list), graph.tail)
    with graph.loader() as loader:
        found = list(loader)
        assert {type(each.error) for each in loader.profile().quarantined} == {str}
        assert all("not in the trainer" in each.error for each in loader.profile().quarantined)
    flat = [x for each in found for x in each] if batched else found
    assert set(range(20)) - set(flat) == {3}


class DiesAsItOpens(pg.Operator):
    kind = "map"

    def open(self, context):
        os._exit(7)

    def process(self, chunk):
        return chunk


def test_a_process_that_dies_in_open_is_named():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3))).then(DiesAsItOpens(), name="work", backend="process")
    with pytest.raises(WorkerDiedError, match=r"stage 'work'.*exit\(7\)"):
        delivered(graph)


def wait_for_writer(fifo):
    """Blocks until one has opened and closed it: ``open()`` would wait for ever where none comes."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert select.select([reader], [], [], 60)[0]
    finally:
        os.close(reader)


class NeverOpens(pg.Operator):
    kind = "map"

    def __init__(self, path):
        self.path = path

    def open(self, context):
        with open(self.path, "w"):
            pass
        threading.Event().wait()

    def process(self, chunk):
        return chunk


def test_close_does_not_wait_for_an_open_that_hangs(tmp_path):
    path = str(tmp_path / "opened")
    os.mkfifo(path)
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3))).then(NeverOpens(path), name="work", backend="process")
    loader = graph.loader()
    ended = []

    def iterate():
        try:
            list(loader)
        except Exception as error:
            ended.append(error)

    runner = threading.Thread(target=iterate, daemon=True)
    runner.start()
    wait_for_writer(path)  # the process is inside
    loader.close()
    runner.join(60)
    assert not runner.is_alive()
    assert "closed" in str(ended)


def test_a_zygote_that_is_killed_is_started_again():
    graph = pipeline(lambda x: x, items=range(200))
    with graph.loader() as loader:
        found = []
        for x in loader:
            found.append(x)
            if x == 20:
                os.kill(zygote._shared.pid, signal.SIGKILL)
    assert found == list(range(200))


def has_ended(pid):
    """Whether a process that is no child ends soon."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(end, select.POLLIN)
    try:
        return bool(poll.poll(30_000))
    finally:
        os.close(end)


@pytest.mark.parametrize("end", ["is closed", "exits", "is killed"])
def test_what_a_function_has_started_ends_with_its_worker(tmp_path, end):
    def start(x):
        if x == 3:
            program = subprocess.Popen(["sleep", "1000"])
            with (tmp_path / "pids").open("a") as pids:
                pids.write(f"{program.pid}\n")
            if end == "exits":
                os._exit(3)
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return x

    found = delivered(pipeline(start, on_error=pg.Skip(1)))
    assert set(range(20)) - set(found) == (set() if end == "is closed" else {3})
    started = (tmp_path / "pids").read_text().split()
    assert len(started) == (1 if end == "is closed" else 2)
    assert all(has_ended(int(pid)) for pid in started)


def test_items_that_end_one_process_each_come_all_the_same(tmp_path):
    def numbers():
        for flag in [tmp_path / str(number) for number in range(3)]:
            if not flag.exists():
                flag.touch()
                os._exit(7)
            yield flag.name

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(numbers), backend="process")
    assert delivered(graph) == ["0", "1", "2"]
