"""However a stage begins and ends: its open() and close() are called once, and what they raise is said alike."""

import logging
import signal
import threading

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine import crew
from pipegraph.engine.threads import Threads

pytestmark = pytest.mark.usefixtures("no_leaks")


class Numbers(pg.Source):
    """A random-access source that counts how often each of its copies is opened and closed."""

    random_access = True
    opened: list
    closed: list

    def __init__(self, fails=(), breaks_at="never"):
        self.opened, self.closed, self.fails, self.breaks_at = [], [], fails, breaks_at

    def length(self, epoch, rank, world_size):
        return 8

    def positions(self, epoch, rank, world_size, start):
        return iter(range(start, 8))

    def read(self, position, epoch):
        if position in self.fails:
            raise ValueError(position)
        return position

    def open(self, context):
        if self.breaks_at == "open":
            raise OSError("cannot open")
        self.opened.append(id(self))

    def close(self):
        self.closed.append(id(self))
        if self.breaks_at == "close":
            raise OSError("cannot close")


@pytest.mark.parametrize("options", [{"backend": "inline"}, {"workers": 3}], ids=str)
def test_every_copy_that_was_opened_is_closed_once(options):
    source = Numbers(fails=(2, 5))
    graph = pg.Graph("g")
    graph.add(source, name="source", on_error=pg.Skip(), **options)
    with graph.loader() as loader:
        assert len(list(loader)) == 6
    assert sorted(source.closed) == sorted(source.opened)
    assert len(set(source.closed)) == len(source.closed)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_source_that_cannot_be_opened_names_its_stage(backend):
    graph = pg.Graph("g")
    graph.add(Numbers(breaks_at="open"), name="numbers", backend=backend)
    with graph.loader() as loader, pytest.raises(OSError, match="cannot open") as caught:
        list(loader)
    assert any("stage 'numbers'" in text for text in caught.value.__notes__)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_source_that_cannot_be_closed_is_a_warning(backend):
    graph = pg.Graph("g")
    graph.add(Numbers(breaks_at="close"), name="numbers", backend=backend)
    loader = graph.loader()
    assert list(loader) == list(range(8))
    with pytest.warns(
        pg.errors.PipegraphWarning, match=r"stage 'numbers': close\(\) raised OSError: cannot close"
    ):
        loader.close()
    loader.close()


def test_a_close_that_was_interrupted_is_finished_by_the_next():
    closed = []

    class Slow(pg.Operator):
        def process(self, chunk):
            return chunk

        def close(self):
            closed.append(self)

    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(3))).then(Slow(), workers=2).then(Slow(), backend="inline")
    loader = graph.loader()
    list(loader)
    joined = Threads._joined

    def interrupted(self, thread, deadline):
        Threads._joined = joined
        raise KeyboardInterrupt

    Threads._joined = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            loader.close()
    finally:
        Threads._joined = joined
    loader.close()
    assert len(closed) == 3


def test_a_close_that_is_interrupted_while_a_worker_runs_leaves_that_worker_to_the_next(monkeypatch):
    waits, returns = threading.Event(), threading.Event()
    joined = Threads._joined

    def joining(self, thread, deadline):
        waits.set()
        return joined(self, thread, deadline)

    def work(x):
        if x == 1:
            waits.wait()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            returns.wait()
        return x

    monkeypatch.setattr(Threads, "_joined", joining)
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(3))).then(work)
    loader = graph.loader()
    next(iter(loader))
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    (worker,) = (thread for thread in threading.enumerate() if thread.name == "pipegraph-g-work-0")
    releasing = threading.Thread(target=returns.set)
    releasing.start()
    loader.close()
    releasing.join()
    assert worker not in threading.enumerate()


def test_a_pass_that_waits_for_a_function_of_the_one_before_says_so(caplog, monkeypatch):
    monkeypatch.setattr(crew, "GRACE_S", 0.0)
    inside = threading.Event()

    class Resume(threading.Event):
        def wait(self, timeout=None):
            inside.set()  # from here on the worker's stack has the line that waits
            return super().wait(timeout)

    resume = Resume()

    class Says(logging.Handler):
        def emit(self, record):
            if "stage 'waits'" in record.getMessage():  # others may not have left it yet either
                resume.set()  # only now can the new pass begin

    def work(x):
        if x == 1 and not inside.is_set():
            resume.wait()
        return x

    log, handler = logging.getLogger("pipegraph"), Says()
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(3))).then(work, name="waits")
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING, logger="pipegraph"), graph.loader() as loader:
            assert next(iter(loader)) == 0
            assert inside.wait(20)
            assert list(loader) == [0, 1, 2]
    finally:
        log.removeHandler(handler)
        resume.set()
    (record,) = [record for record in caplog.records if "stage 'waits'" in record.getMessage()]
    assert record.getMessage().startswith(
        "stage 'waits': a new pass waits for its worker, which is still in the one"
    )
    assert "resume.wait()" in record.getMessage()
