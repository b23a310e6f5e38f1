"""The public test helpers find what they promise to find."""

import re
import threading

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import Resources, assert_resumes_exactly, assert_same_everywhere, fingerprint

pytestmark = pytest.mark.usefixtures("no_leaks")


class Forgetful(pg.Operator):
    """Has a state and says so to nobody."""

    def __init__(self):
        self.count = 0

    def process(self, chunk):
        self.count += 1
        return chunk.replace(chunk.data + self.count)


def forgetful():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(8))).then(Forgetful(), name="f")
    return graph


def test_resuming_that_loses_a_state_is_found():
    with pytest.raises(
        AssertionError,
        match=r"restored after 0 chunks of epoch 0, and again after 8 more: chunk 0: the data: should be 9, is 1",
    ):
        assert_resumes_exactly(forgetful)


class FromTheFirst(pg.Source):
    """Does not begin at ``start``."""

    def length(self, epoch, rank, world_size):
        return 20

    def iterate(self, epoch, rank, world_size, start):
        return ((number, number) for number in range(20))


class Cut(pg.Regroup):
    """Cuts what it gets into blocks of four; what is left goes into the next block, and no state holds it."""

    def begin(self):
        self.rest, self.held = [], []

    def process(self, chunk):
        self.rest += [chunk.data] * (1 + chunk.data % 3)
        self.held.append(chunk)
        while len(self.rest) >= 4:
            yield pg.Chunk.group(self.held, self.rest[:4], batched=False)
            self.rest = self.rest[4:]
            self.held = self.held[-1:] if self.rest else []


class TwoOfEach(pg.FanIn):
    """Two items of each of two inputs in turn; its cursor does not say how many of them have come."""

    def begin(self, inputs, epoch):
        self.ended, self.count = set(), 0

    def next_input(self):
        turn = self.count // 2 % 2
        return None if len(self.ended) == 2 else 1 - turn if turn in self.ended else turn

    def end_input(self, index):
        self.ended.add(index)

    def process(self, chunk):
        self.count += 1
        return chunk

    def cursor(self, positions):
        return tuple(positions)

    def cursors(self, cursor, inputs):
        return cursor


class TakesTurns(pg.FanOut):
    """Counts its calls, and chooses by their number."""

    outputs = 2
    calls = 0

    def choose(self, chunk):
        self.calls += 1
        return self.calls % 2


FAULTY = {
    "a source": lambda graph: graph.add(FromTheFirst()),
    "a regroup": lambda graph: graph.add(ops.FromIterable(range(20))).then(Cut()),
    "a fan-in": lambda graph: graph.add(
        TwoOfEach(), graph.add(ops.FromIterable(range(10))), graph.add(ops.FromIterable(range(30, 40)))
    ),
    "a route": lambda graph: graph.add(
        ops.Concat(), *graph.add(TakesTurns(), graph.add(ops.FromIterable(range(20))))
    ),
}


@pytest.mark.parametrize("case", FAULTY)
def test_an_operator_that_does_not_resume_exactly_is_found(case):
    def make():
        graph = pg.Graph("g")
        FAULTY[case](graph)
        return graph

    with pytest.raises(AssertionError, match="restored after"):
        assert_resumes_exactly(make)


class Numbered(pg.Operator):
    """Tells which worker it is; where there are several, the first sample is held until another worker has one."""

    def open(self, context):
        self.worker = context.worker
        self.another = context.share("another", threading.Event)

    def process(self, chunk):
        if chunk.data == 0 and threading.current_thread() is not threading.main_thread():
            self.another.wait()
        else:
            self.another.set()
        return chunk.replace(self.worker)


def test_a_dependence_on_workers_is_found():
    def numbered():
        graph = pg.Graph("g")
        graph.add(ops.FromIterable(range(8))).then(Numbered(), name="n")
        return graph

    with pytest.raises(AssertionError, match="epoch 0 with 4 workers per stage"):
        assert_same_everywhere(numbered, workers=(4,), processes=0)


def test_leaks_are_named(tmp_path):
    before = Resources.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    with open(tmp_path / "file", "w"):
        leaked = Resources.now().leaked_since(before)
    stop.set()
    thread.join()
    assert leaked[0] == "thread forgotten" and leaked[1].endswith("/file") and len(leaked) == 2


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"a": 1}, {"a": 2}, r"\['a'\]: should be 1, is 2"),
        ([1, 2], [1, 2, 3], r"2 entries.*3"),
        ({"a": 1}, {"b": 1}, r"should have the keys \['a'\], has \['b'\]"),
        (np.zeros(3), np.zeros(3, np.float32), "<f8.*<f4"),
        (torch.zeros(3), torch.zeros(4), r"\(3,\).*\(4,\)"),
        ("x" * 10**6, "y" * 10**6, "should be 'xxx"),
    ],
)
def test_differences_are_located(one, other, said):
    from pipegraph.testing.outcome import difference

    message = difference(fingerprint(one), fingerprint(other))
    assert re.search(said, message, re.DOTALL) and len(message) < 600
