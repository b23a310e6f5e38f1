"""crew.py: close() may meet the start of a pass, whatever that is doing."""

import threading
from contextlib import suppress

import pytest
from lines import at_line

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import Operator
from pipegraph.errors import LoaderClosedError

pytestmark = pytest.mark.usefixtures("no_leaks")


class Slow(Operator):
    """Stays in ``open`` until it may continue; records how often its copies were opened and closed."""

    def __init__(self, inside=None):
        self.entered, self.go = threading.Event(), threading.Event()
        self.inside = inside
        self.opened, self.closed = [], []

    def open(self, context):
        self.entered.set()
        if self.inside is not None:
            self.inside()
        else:
            assert self.go.wait(30)
        self.opened.append(context.worker)

    def process(self, chunk):
        return chunk

    def close(self):
        self.closed.append(1)


class SlowRows(ops.FromSequence):
    """A source that stays in ``open``."""

    def __init__(self, slow):
        super().__init__(range(9))
        self.slow = slow

    def open(self, context):
        super().open(context)
        self.slow.open(context)

    def close(self):
        self.slow.close()


def graph_with(slow, where):
    graph = pg.Graph("g")
    if where == "source":
        graph.add(SlowRows(slow), name="source", backend="inline")
    else:
        graph.add(ops.FromSequence(range(9))).then(slow, name="slow", backend=where)
    return graph


def outcome(call):
    """What a call in another thread returned or raised, once joined."""
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(30)
        assert not thread.is_alive(), "it hangs"
        return found[0]

    return join


@pytest.mark.parametrize("where", ["inline", "thread", "source"])
def test_close_from_another_thread_while_a_pass_starts_ends_everything(where):
    slow = Slow()
    loader = graph_with(slow, where).loader()
    beginning = outcome(lambda: iter(loader))
    assert slow.entered.wait(30)
    closing = outcome(loader.close)
    assert loader._crew.stopping.wait(30)
    slow.go.set()
    error = beginning()
    assert isinstance(error, LoaderClosedError) and "this loader is closed" in str(error)
    assert closing() is None
    assert len(slow.closed) == len(slow.opened) > 0
    assert not [t for t in threading.enumerate() if t.name.startswith("pipegraph-")]


@pytest.mark.parametrize("first", range(4))
def test_close_may_come_between_any_two_lines_of_a_pass_and_its_start(first):
    number, more = 1 + first, True
    while more:
        graph = pg.Graph("g")
        rows = graph.add(ops.FromSequence(range(3)), name="rows")
        rows.then(lambda x: x, name="work").then(ops.Batch(2, collate=list), backend="inline")
        loader = graph.loader()
        closers = []

        def close(loader=loader, closers=closers):
            closers.append(outcome(loader.close))

        def use(loader=loader):
            try:
                assert list(loader) in ([[0, 1], [2]],)
            except LoaderClosedError:
                pass

        using = outcome(lambda number=number, close=close, use=use: at_line(number, close, use))
        more = using()
        assert isinstance(more, bool), (number, more)
        for closed in closers:
            assert closed() is None, number
        loader.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("pipegraph-")], number
        number += 4 * 5


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_ctrl_c_between_any_two_lines_of_a_start_leaves_no_thread_and_the_loader_usable(
    backend, first, recwarn
):
    number, more = 1 + first, True
    while more:
        slow = Slow()
        slow.go.set()
        graph = pg.Graph("g")
        rows = graph.add(ops.FromSequence(range(3)), name="rows")
        rows.then(slow, name="work", backend=backend, workers=2 if backend == "thread" else 1)
        loader = graph.loader()

        def use(loader=loader):
            with suppress(KeyboardInterrupt):
                iter(loader)

        using = outcome(lambda number=number, use=use: at_line(number, interrupt, use))
        more = using()
        assert isinstance(more, bool), (number, more)
        assert list(loader) == [0, 1, 2], number
        loader.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("pipegraph-")], number
        # An inline stage is opened by the thread that is interrupted, which may happen before that is noted.
        if backend == "thread":
            assert len(slow.closed) == len(slow.opened), number
        assert not [str(each.message) for each in recwarn], number
        number += 4 * 3
