"""What goes wrong between the trainer and its worker processes, and costs no more than the item it happened to."""

import contextlib
import errno
import gc
import os
import random
import select
import signal
import subprocess
import threading

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.process import zygote
from pipegraph.errors import WorkerDiedError
from tests.process.process_pipelines import delivered, hosts, pipeline

pytestmark = pytest.mark.usefixtures("no_leaks")


HERE = os.getpid()


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


def test_an_item_that_cannot_be_read_in_the_process_is_its_own_error():
    items = [OnlyHere("a worker") if x == 3 else x for x in range(6)]
    with pipeline(lambda x: x, items=items, on_error=pg.Skip(1)).loader() as loader:
        assert list(loader) == [0, 1, 2, 4, 5]
        (entry,) = loader.profile().quarantined
    assert "not in a worker" in str(entry.error)


class Unwritable:
    def __reduce__(self):
        raise OSError("a handle")


def test_a_result_whose_pickling_raises_anything_at_all_is_the_items_own_error():
    def work(x):
        return Unwritable() if x == 3 else x

    graph = pipeline(work, on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert list(loader) == [x for x in range(20) if x != 3]
        (entry,) = loader.profile().quarantined
        assert "a handle" in str(entry.error)
        assert not any(host.deaths for host in hosts(loader))


def test_a_process_that_closes_its_socket_and_continues_is_ended():
    def work(x):
        if x == 3:
            os.closerange(3, 500)
            threading.Event().wait()
        return x

    with pytest.raises(WorkerDiedError, match="stage 'work'"):
        delivered(pipeline(work))


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


def test_close_does_not_wait_for_a_zygote_that_still_imports(tmp_path, monkeypatch):
    inside = str(tmp_path / "inside")
    os.mkfifo(inside)
    (tmp_path / "sitecustomize.py").write_text(
        f"import threading\nopen({inside!r}, 'w').close()\nthreading.Event().wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    gc.collect()  # a loader of an earlier test may have kept a zygote, and none would start
    assert zygote._shared is None
    loader, ended = pipeline(lambda x: x).loader(), []

    def iterate():
        try:
            list(loader)
        except Exception as error:
            ended.append(error)

    runner = threading.Thread(target=iterate, daemon=True)
    runner.start()  # there is a thread: the zygote is a fresh interpreter
    wait_for_writer(inside)  # it is about to import
    loader.close()
    runner.join(60)
    assert not runner.is_alive()
    assert "closed" in str(ended)
    zygote.end_lasting()  # as the trainer's exit does: it would import for ever
    assert zygote._shared is None


def test_a_zygote_that_is_killed_is_started_again():
    graph = pipeline(lambda x: x, items=range(200))
    with graph.loader() as loader:
        found = []
        for x in loader:
            found.append(x)
            if x == 20:
                os.kill(zygote._shared.pid, signal.SIGKILL)
    assert found == list(range(200))


def test_a_zygote_that_is_killed_while_workers_start_each_time_is_the_death_of_a_worker(monkeypatch):
    asks = zygote.Zygote._ask

    def killed(self, request, fds):
        if request[:1] == zygote.SPAWN:
            os.kill(self.pid, signal.SIGKILL)
        return asks(self, request, fds)

    monkeypatch.setattr(zygote.Zygote, "_ask", killed)
    graph = pipeline(lambda x: x, workers=3)
    with graph.loader() as loader, pytest.raises(WorkerDiedError, match="the process that starts the others"):
        list(loader)


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


def test_random_workers_that_are_killed_lose_nothing():
    """A worker is killed again when the rows that it had then have come: a row that is hit twice is blamed, by design."""
    draw, in_flight, items = random.Random(5), 500, 6000
    graph = pipeline(lambda x: [x] * 50, items=range(items), workers=2)
    graph.add(ops.Batch(4, collate=list), graph.tail)
    with graph.loader() as loader:
        found, spared, kills = [], {}, 0
        for batch in loader:
            found += [row[0] for row in batch]
            host = draw.choice(hosts(loader))
            if (pid := host.pid) and len(found) >= spared.get(host, 0):
                with contextlib.suppress(ProcessLookupError):  # it has ended already, and is being replaced
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                spared[host] = len(found) + in_flight
    assert kills >= 10
    assert found == list(range(items))


def test_a_forked_child_leaves_its_parents_processes_alone():
    graph = pipeline(lambda x: x, items=range(100))
    with graph.loader() as loader:
        found = []
        for x in loader:
            found.append(x)
            if x == 10:
                pids = {host.pid for host in hosts(loader)}
                child = os.fork()
                if not child:
                    signal.alarm(60)  # a child that hangs fails the test, and does not stop it
                    try:
                        loader.close()
                        del loader
                        gc.collect()
                        os._exit(0)
                    finally:
                        os._exit(1)
                assert os.waitpid(child, 0)[1] == 0
                assert {host.pid for host in hosts(loader)} == pids
        assert not any(host.deaths for host in hosts(loader))
    assert found == list(range(100))


def test_a_forked_child_can_have_a_loader_of_its_own():
    graph = pipeline(lambda x: x)
    with graph.loader() as loader:
        running = iter(loader)
        assert next(running) == 0
        child = os.fork()
        if not child:
            signal.alarm(60)
            code = 1
            try:
                code = 0 if delivered(pipeline(lambda x: x)) == list(range(20)) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert list(running) == list(range(1, 20))


def test_a_child_that_is_forked_after_the_end_of_all_processes_keeps_its_own_files():
    ended = zygote.borrow()
    zygote.release(ended)
    files = [os.pipe() for _ in range(8)]  # they get the numbers that have become free
    child = os.fork()
    if not child:
        signal.alarm(60)
        code = 1
        try:
            for reader, writer in files:
                os.fstat(reader), os.fstat(writer)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    for reader, writer in files:
        os.close(reader)
        os.close(writer)


def test_a_trainer_that_ignores_the_end_of_its_children_can_have_processes(programs):
    script = """
import signal
import subprocess
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
import pipegraph as pg
from pipegraph import operators as ops
graph = pg.Graph("g")
graph.add(ops.FromSequence(range(5))).then(lambda x: x + 1, backend="process")
with graph.loader() as loader:
    print(list(loader))
"""
    done = programs.run(script)
    assert done.stdout == "[1, 2, 3, 4, 5]\n", done.stderr


def test_a_trainer_that_takes_a_schedulers_sigterm_keeps_its_workers(programs):
    script = """
import os, signal
import pipegraph as pg
from pipegraph import operators as ops
signal.signal(signal.SIGTERM, lambda *_: print("preempted", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: print("soon", flush=True))
graph = pg.Graph("g")
graph.add(ops.FromSequence(range(50))).then(lambda x: (x, os.getpid()), name="work", backend="process")
with graph.loader() as loader:
    found = []
    for x, pid in loader:
        found.append((x, pid))
        if x == 3:
            os.killpg(0, signal.SIGTERM)
            os.killpg(0, signal.SIGUSR1)
print([x for x, _ in found] == list(range(50)), len({pid for _, pid in found}))
"""
    done = programs.run(script, start_new_session=True)
    assert sorted(done.stdout.split()) == sorted(["preempted", "soon", "True", "1"]), done.stderr


class Total(pg.Operator):
    kind = "map"

    def __init__(self):
        self.total = 0

    def process(self, chunk):
        if chunk.data == 5:
            os._exit(1)
        self.total += chunk.data
        chunk.data = self.total
        return chunk

    def state_dict(self):
        return self.total

    def load_state_dict(self, state):
        self.total = state


def test_what_an_operator_held_is_never_begun_anew_unnoticed():
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(10))).then(Total(), name="work", backend="process", on_error=pg.Skip(5))
    with pytest.raises(WorkerDiedError):
        delivered(graph)


def test_cycles_of_open_break_and_close_leave_nothing_behind():
    def interrupted():
        return [each for each in gc.get_objects() if type(each) is Cancelled]

    graph = pipeline(lambda x: x, items=range(100))
    gc.collect()
    before, held = set(os.listdir("/proc/self/fd")), len(interrupted())
    gc.disable()  # nothing of an ended process may wait for it, such as what a traceback holds
    try:
        for _ in range(10):
            with graph.loader() as loader:
                for x in loader:
                    if x == 5:
                        break
        assert set(os.listdir("/proc/self/fd")) <= before
        assert len(interrupted()) == held  # none is held by a frame in its own traceback
    finally:
        gc.enable()
    assert zygote._shared is None


@pytest.mark.parametrize("failing", ["wait", "receive"])
def test_what_an_operator_held_is_not_lost_in_silence_where_its_answer_cannot_be_received(
    failing, monkeypatch
):
    """The process is ended, and another one would begin with no sum: Skip would leave out one item and go on."""

    def fail(*args):
        monkeypatch.undo()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    graph = pg.Graph("g")
    graph.add(ops.FromSequence([1] * 500)).then(Total(), name="work", backend="process", on_error=pg.Skip())
    with graph.loader() as loader:
        passing = iter(loader)
        assert next(passing) == 1
        (host,) = hosts(loader)
        owner, name = (host._selector, "select") if failing == "wait" else (host._link, "receive")
        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(WorkerDiedError, match=r"cannot be received: .*Too many open files") as caught:
            list(passing)
    assert "what the operator held is lost" in str(caught.value.__notes__)
