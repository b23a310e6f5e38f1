"""Batches whose rows were made of several samples each, as a mosaic's or a packed block's."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("no_leaks")


class Blocks(pg.Regroup):
    """A row costs one step of a loop, and no call of ``process``."""

    def __init__(self, size):
        self.size = size

    def begin(self):
        self.tokens, self.held = [], []

    def state_dict(self):
        return {"tokens": self.tokens, "held": self.held}

    def load_state_dict(self, state):
        self.tokens, self.held = state["tokens"], state["held"]

    def process(self, chunk):
        self.tokens += chunk.data
        self.held.append(chunk)
        while len(self.tokens) >= self.size:
            yield pg.Chunk.group(self.held, self.tokens[: self.size], batched=False)
            self.tokens = self.tokens[self.size :]
            self.held = self.held[-1:] if self.tokens else []


class Held(pg.Regroup):
    """Batches one late, kept in a state meanwhile."""

    needs = gives = "batch"

    def begin(self):
        self.held = []

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]

    def process(self, chunk):
        self.held.append(chunk)
        return [] if len(self.held) < 2 else [self.held.pop(0)]

    def flush(self):
        held, self.held = self.held, []
        return held


def blocks(*stages, **options):
    def make():
        graph = pg.Graph("blocks")
        node = graph.add(ops.FromIterable([[i] * (i % 7 + 1) for i in range(20)])).then(Blocks(4))
        for stage in (ops.Batch(3), *stages):
            node = node.then(stage, **options)
        node.then(ops.Unbatch(), **options)
        return graph

    return make


def test_blocks_in_batches_come_apart_again_and_resume_exactly():
    graph = blocks(Held())()
    with graph.loader("blocks") as loader:
        expected = [(list(chunk.data), tuple(chunk.lineages), chunk.keys) for chunk in loader.chunks()]
    with graph.loader() as loader:
        assert [(list(c.data), tuple(c.lineages), c.keys) for c in loader.chunks()] == expected
    assert any(len(lineages) > 1 for _, lineages, _ in expected)
    assert_resumes_exactly(blocks(Held()))
