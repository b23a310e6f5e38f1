"""``Pack``: which tokens lie where, exact resume at every step, hostile documents."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError
from pipegraph.testing import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("no_leaks")


def documents(lengths):
    """Document i of tokens 100*i, 100*i + 1 ..."""
    return [np.arange(100 * i, 100 * i + n) for i, n in enumerate(lengths)]


def rows_of(items, *args, epochs=1, **options):
    graph = pg.Graph("g", seed=1)
    graph.add(ops.FromIterable(items)).then(ops.Pack(*args, **options), name="pack")
    with graph.loader(epochs=epochs) as loader:
        return [row for _ in range(epochs) for row in loader]


def tokens_of(rows):
    """Every token that is not padding, in the order of the rows."""
    return [int(t) for row in rows for t, s in zip(row["tokens"], row["segment_ids"], strict=True) if s]


def test_documents_are_laid_end_to_end_and_cut():
    rows = rows_of(documents([3, 6, 1]), 4)
    assert [row["tokens"].tolist() for row in rows] == [
        [0, 1, 2, 100],
        [101, 102, 103, 104],
        [105, 200, 0, 0],
    ]
    assert [row["segment_ids"].tolist() for row in rows] == [[1, 1, 1, 2], [1, 1, 1, 1], [1, 2, 0, 0]]
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert rows[0]["segment_ids"].dtype == rows[0]["position_ids"].dtype == torch.int32
    assert rows[0]["tokens"].dtype == torch.int64


def test_whole_documents_are_put_where_they_fit_best():
    rows = rows_of(documents([5, 4, 3, 2, 8]), 8, "fit", window=5)
    assert [row["tokens"].tolist() for row in rows] == [
        [0, 1, 2, 3, 4, 200, 201, 202],  # the oldest, and the longest for which there is room
        [100, 101, 102, 103, 300, 301, 0, 0],
        [400, 401, 402, 403, 404, 405, 406, 407],
    ]
    assert rows[1]["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
    assert rows[1]["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 23), max_size=60),
    st.integers(1, 9),
    st.sampled_from(["split", "fit"]),
    st.integers(1, 12),
)
def test_every_token_comes_once_in_whole_segments(lengths, length, method, window):
    items = documents(lengths)
    rows = rows_of(items, length, method, window=window)
    assert sorted(tokens_of(rows)) == sorted(t for item in items for t in item.tolist())
    for row in rows:
        assert all(len(row[name]) == length for name in row)
        segments = row["segment_ids"].tolist()
        used = [s for s in segments if s]
        assert segments == used + [0] * (length - len(used))
        for number, group in itertools.groupby(enumerate(used), lambda pair: pair[1]):
            places = [place for place, _ in group]
            part = row["tokens"][places].tolist()
            assert part == list(range(part[0], part[0] + len(part)))
            assert row["position_ids"][places].tolist() == list(range(len(part)))
            if method == "fit":
                assert len(part) == length or part[-1] % 100 == lengths[part[0] // 100] - 1
            assert number >= 1
    if method == "split":
        assert all(int(row["segment_ids"][-1]) for row in rows[:-1])


# -- resume ----------------------------------------------------------------------------------------


LENGTHS = [(7 * i) % 13 for i in range(26)]


def packed(method, length=8, window=6, lengths=LENGTHS, batch=None):

    def make():
        graph = pg.Graph("g", seed=3)
        source = graph.add(ops.FromSequence(documents(lengths), shuffle=True), name="documents")
        node = source.then(lambda x: x + 0, workers=2).then(
            ops.Pack(length, method, window=window), name="pack"
        )
        if batch:
            node.then(ops.Batch(batch))
        return graph

    return make


@pytest.mark.parametrize("method", ["split", "fit"])
@pytest.mark.parametrize("batch", [None, 3])
def test_a_resume_is_exact_at_every_step(method, batch):
    assert_resumes_exactly(packed(method, batch=batch))


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 24), max_size=10),
    st.integers(2, 9),
    st.sampled_from(["split", "fit"]),
    st.integers(1, 9),
)
def test_random_documents_resume_exactly(lengths, length, method, window):
    assert_resumes_exactly(packed(method, length, window, lengths), epochs=1)


def test_what_has_left_after_a_resume_inside_a_document_is_held_no_more():
    make = packed("split", 1000, lengths=[1500] * 400)
    with make().loader() as loader, make().loader(memory_limit="1 MB") as again:
        next(iter(loader))
        again.load_state_dict(loader.state_dict())
        assert len(list(again)) == 599


def test_below_an_unordered_stage_it_is_refused():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(documents([3]))).then(lambda x: x, workers=2, ordered=False).then(ops.Pack(2))
    with pytest.raises(
        GraphError, match=r"stage 'pack': Pack takes items by their order, .* make it ordered=True"
    ):
        graph.plan()


# -- hostile documents -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"a": [1, 2], "b": [1]}], "field 'a' has 2 values and field 'b' has 1"),
        ([["a", "b"]], "field 'tokens' must be a list of numbers"),
        ([np.array(["a"])], "field 'tokens' must be a list of numbers"),
        (
            [np.zeros(2, np.int32), np.zeros(2, np.int64)],
            "holds int32 of .* in one document and int64",
        ),
        ([{"a": 5}], "no field with a value per token"),
    ],
)
def test_documents_that_cannot_be_packed_are_named(items, message):
    with pytest.raises(DataError, match=message) as caught:
        rows_of(items, 4)
    assert any("stage 'pack'" in note for note in caught.value.__notes__)
