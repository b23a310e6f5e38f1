"""Random lives of sources that the training loop changes between epochs, of objects without a size."""

from __future__ import annotations

import json
import os
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops

EXAMPLES = int(os.environ.get("PIPEGRAPH_FUZZ_EXAMPLES", "30"))

pytestmark = pytest.mark.usefixtures("no_leaks")


class Held:
    """A value that is no container and has no buffer."""

    __slots__ = ("text", "value")

    def __init__(self, value):
        self.value = value
        self.text = str(value) * 50


class Given:
    """A list that the loop changes, as sources of each kind read it."""

    def __init__(self, kind):
        self.kind = kind
        self.items = [0]

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        yield from self.items

    def __getitem__(self, index):
        return self.items[index]

    def source(self):
        if self.kind == "sampler":
            return ops.FromSequence(range(1_000), sampler=self)
        if self.kind == "list":
            return ops.FromIterable(self.items)
        if self.kind == "sequence":
            return ops.FromSequence(self)
        return ops.FromIterable(self if self.kind == "iterable" else lambda: iter(list(self.items)))


def held(value):
    return Held(int(value))


LISTS = st.lists(st.integers(0, 999), max_size=12)


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    kind=st.sampled_from(["sampler", "list", "sequence", "iterable", "function"]),
    epochs=st.lists(st.tuples(LISTS, st.none() | st.integers(0, 12), st.booleans()), min_size=1, max_size=5),
    prefetch=st.sampled_from([1, 3, None]),
    placed=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["thread", "inline"])), min_size=2, max_size=2
    ),
    size=st.integers(1, 4),
    limit=st.sampled_from([None, 100_000]),
)
def test_each_pass_delivers_what_its_source_held_when_it_began(kind, epochs, prefetch, placed, size, limit):
    """Each epoch: what the loop puts in, after how many batches it leaves, whether it resumes from a state then."""
    thing = Given(kind)
    if kind == "sequence":
        prefetch = 1  # else the next epoch of a dataset that is no list is read ahead

    def build():
        graph = pg.Graph("fuzz")
        (many, where), (more, there) = placed
        source_workers = many if kind in ("sampler", "sequence") and where == "thread" else 1
        node = graph.add(thing.source(), workers=source_workers, backend=where)
        node = node.then(held, workers=more if there == "thread" else 1, backend=there)
        node.then(ops.Batch(size, collate=list))
        return graph

    loader = build().loader(epochs=prefetch, memory_limit=limit)
    try:
        for items, stop, resumes in epochs:
            thing.items[:] = items
            expected = [items[first : first + size] for first in range(0, len(items), size)]
            found = [[each.value for each in batch] for batch in islice(loader, stop)]
            assert found == expected[:stop]
            if resumes and stop and stop < len(expected):
                state = json.loads(json.dumps(loader.state_dict()))
                loader.close()
                loader = build().loader(epochs=prefetch, memory_limit=limit)
                loader.load_state_dict(state)
                assert [[each.value for each in batch] for batch in loader] == expected[stop:]
    finally:
        loader.close()
