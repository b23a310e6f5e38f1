"""What operators and iterators keep: every plain value has a form in JSON, and what has none is said early."""

import collections
import dataclasses
import json

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.stage.kept import decode, encode

pytestmark = pytest.mark.usefixtures("no_leaks")


def equal(left, right):
    if isinstance(left, np.ndarray | torch.Tensor):
        return type(left) is type(right) and left.dtype == right.dtype and left.tolist() == right.tolist()
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and equal(vars(left), vars(right))
    if isinstance(left, list | tuple | collections.deque):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(map(equal, left, right))
            and getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
        )
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and list(left) == list(right)
            and all(equal(left[k], right[k]) for k in left)
        )
    return type(left) is type(right) and left == right


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1, b=[2]),
        collections.deque([1, (2, 3)], maxlen=5),
        np.array(["a", "bcd"]),
        np.str_("text"),
        float("inf"),
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_were(value):
    assert equal(decode(json.loads(json.dumps(encode(value)))), value)


class Handle:
    pass


class Windows(pg.Regroup):
    def begin(self):
        self.last = None

    def process(self, chunk):
        last, self.last = self.last, chunk
        return [] if last is None else [pg.Chunk.group([last, chunk], last.data, batched=False)]

    def state_dict(self):
        return {"last": self.last}

    def load_state_dict(self, state):
        self.last = state["last"]


def test_a_held_sample_without_a_form_is_said_at_the_first_snapshot_with_stage_and_remedy():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(range(1000))).then(lambda x: {"x": x, "handle": Handle()}).then(
        Windows(), name="pack"
    )
    found = []
    with graph.loader() as loader, pytest.raises(pg.errors.GraphError) as refused:
        for each in loader:
            found.append(each)
    assert len(found) == 63  # what came before is delivered
    for words in ("stage 'pack'", "Handle", "JSON", "state_dict()"):
        assert words in str(refused.value)


class _Growing(pg.Operator):
    kind = "map"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def process(self, chunk: pg.Chunk) -> pg.Chunk:
        self.seen += [0] * 20
        return chunk

    def state_dict(self) -> dict[str, list[int]]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.seen = list(state["seen"])


def test_a_map_whose_state_grows_resumes_behind_what_was_delivered():
    def loader() -> pg.Loader:
        graph = pg.Graph("growing")
        graph.add(ops.FromSequence(range(600))).then(_Growing())
        return graph.loader()

    with loader() as first:
        batches = iter(first)
        got = [next(batches) for _ in range(300)]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert [*got, *second] == list(range(600))
