"""Ctrl-C before any line that the consumer's thread runs through: the next pass is whole, and no thread is left."""

import logging

import pytest
import torch
from lines import before_lines

import pipegraph as pg
from pipegraph import global_generators, operators as ops
from pipegraph.engine import crew

pytestmark = pytest.mark.usefixtures("no_leaks")

ROWS = list(range(8))


def same(x):
    return x


def rows(graph, **options):
    return graph.add(ops.FromSequence(ROWS), name="rows", capacity=1, **options)


def threads(graph):
    rows(graph).then(same, capacity=1)


def inline_alone(graph):
    graph.add(ops.FromSequence(ROWS), backend="inline").then(same, backend="inline")


def routed(graph):
    routes = rows(graph).then(ops.Route(lambda x: x % 2, outputs=2), capacity=1)
    branches = routes[0].then(same, capacity=1), routes[1].then(same, backend="inline")
    graph.add(ops.Merge(), *branches, capacity=1)


def unordered(graph):
    rows(graph).then(same, workers=2, ordered=False, capacity=1)


class Stuck(logging.Handler):
    """Fails the test if a new pass waits for long for a worker of the one before."""

    def emit(self, record):
        if "a new pass waits for its worker" in record.getMessage():
            raise AssertionError(record.getMessage())


@pytest.fixture
def nothing_hangs(monkeypatch):
    monkeypatch.setattr(crew, "GRACE_S", 60.0)  # on a busy machine a worker's thread may stand for seconds
    log, handler = logging.getLogger("pipegraph"), Stuck()
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


def interrupt(file, line):
    raise KeyboardInterrupt


class Consumer:
    """A loop over a loader that is interrupted and goes on."""

    def __init__(self, make, epochs):
        graph = pg.Graph("g")
        make(graph)
        self.loader = graph.loader(epochs=epochs)
        self.ordered = make is not unordered
        self.got = []

    def one_pass(self):
        self.got = []
        for item in self.loader:
            self.got.append(item)

    def lines(self, begins):
        """The lines of a pass that begins a run, after a ``break``, or that continues one."""
        found = {}
        self.one_pass()
        if begins:
            next(iter(self.loader))
        before_lines(lambda *place: found.setdefault(place), self.one_pass)
        return found

    def is_whole(self, items):
        return (items if self.ordered else sorted(items)) == ROWS

    def interrupt_before(self, place, begins, resumes):
        """Interrupt a pass, look at the rest of it if it ``resumes``, and at the next; False if it has no such line."""
        if begins:
            next(iter(self.loader))
        epoch = self.loader.epoch
        try:
            before_lines(interrupt, self.one_pass, only=place)
        except KeyboardInterrupt:
            pass
        else:
            assert self.is_whole(self.got)
            return False
        got = self.got
        assert not torch._C._dispatch_tls_is_dispatch_key_included(global_generators._key)
        if resumes:
            self.loader.load_state_dict(self.loader.state_dict())
            self.one_pass()
            if self.loader.epoch > epoch + 1:  # it was interrupted behind the end of its epoch
                got = []
            # The item under way counts as delivered or not.
            missing = set(ROWS) - set(got + self.got)
            assert len(got + self.got) + len(missing) == len(ROWS) and len(missing) <= 1, (got, self.got)
            assert not self.ordered or got + self.got == sorted(got + self.got)
        self.one_pass()
        assert self.is_whole(self.got), self.got
        return True


GRAPHS = [threads, inline_alone, routed, unordered]


@pytest.mark.parametrize(("epochs", "make"), [*zip([1, None] * 2, GRAPHS, strict=True)])
def test_after_ctrl_c_before_any_line_of_a_pass_the_next_one_is_whole(make, epochs, nothing_hangs):
    consumer = Consumer(make, epochs)
    with consumer.loader:
        lines = dict.fromkeys(consumer.lines(begins=True), True)
        lines.update(dict.fromkeys(consumer.lines(begins=False), False))
        met, own = (
            0,
            [*lines.items()][GRAPHS.index(make) % 3 :: 3],
        )  # each graph takes other lines, of those that all run
        for number, (place, begins) in enumerate(own):
            try:
                met += consumer.interrupt_before(place, begins, resumes=number % 2)
            except BaseException as error:
                error.add_note(f"interrupted before {place}")
                raise
        assert met > 0.8 * len(own)
