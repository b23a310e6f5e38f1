"""Regrouping operators of users that hold samples of their own choice: how they resume with a state."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("no_leaks")

BLOCK = 4


class Cut(pg.Regroup):
    """Concatenates tokens and cuts them into blocks; what is left of a document goes into the next block."""

    def begin(self):
        self.rest, self.held = [], []

    def process(self, chunk):
        self.rest += chunk.data
        self.held.append(chunk)
        made = []
        while len(self.rest) >= BLOCK:
            made.append(pg.Chunk.group(self.held, self.rest[:BLOCK], batched=False))
            self.rest = self.rest[BLOCK:]
            self.held = self.held[-1:] if self.rest else []
        return made

    def flush(self):
        rest, held = self.rest, self.held
        self.begin()
        return [pg.Chunk.group(held, rest, batched=False)] if rest else []


class CutWithState(Cut):
    def state_dict(self):
        return {"rest": self.rest, "held": self.held}

    def load_state_dict(self, state):
        self.rest, self.held = state["rest"], state["held"]


class FirstFit(pg.Regroup):
    """Documents into bins of a fixed room; the oldest bin leaves when there are too many."""

    def begin(self):
        self.bins = []

    def process(self, chunk):
        for bin in self.bins:
            if sum(len(each.data) for each in bin) + len(chunk.data) <= 8:
                bin.append(chunk)
                break
        else:
            self.bins.append([chunk])
        return [self.made(self.bins.pop(0))] if len(self.bins) > 3 else []

    def made(self, bin):
        return pg.Chunk.group(bin, [each.data for each in bin])

    def flush(self):
        bins, self.bins = self.bins, []
        return [self.made(bin) for bin in bins]


class FirstFitWithState(FirstFit):
    def state_dict(self):
        return {"bins": self.bins}

    def load_state_dict(self, state):
        self.bins = state["bins"]


def documents(count=40):
    return [[i] * (1 + i * 7 % 5) for i in range(count)]


def over(operator, items=None, ordered=True):
    def make():
        graph = pg.Graph("g", seed=1)
        node = graph.add(ops.FromIterable(documents() if items is None else items))
        node.then(lambda x: x, name="above", workers=2, ordered=ordered).then(operator(), name="pack")
        return graph

    return make


@pytest.mark.parametrize("every", [1, 3, 64])
@pytest.mark.parametrize("operator", [CutWithState, FirstFitWithState])
def test_a_packer_with_a_state_resumes_exactly(monkeypatch, operator, every):
    monkeypatch.setattr("pipegraph.engine.kinds.stateful.SNAPSHOT_EVERY", every)
    assert_resumes_exactly(over(operator, documents(20)))


def test_below_a_completion_order_stage_a_packer_delivers_each_sample_once(monkeypatch):
    monkeypatch.setattr("pipegraph.engine.kinds.stateful.SNAPSHOT_EVERY", 2)
    assert_resumes_exactly(over(FirstFitWithState, ordered=False))
