"""``Pack``: which tokens lie where, exact resume at every step, hostile documents."""

import itertools
import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError, PipegraphWarning
from pipegraph.operators import packing
from pipegraph.testing import assert_resumes_exactly, assert_same_everywhere

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


def test_an_unfilled_last_row_can_be_left_out_and_padding_chosen():
    items = [{"ids": [1, 2, 3], "labels": [4, 5, 6], "text": "abc", "key": "a"}]
    (row,) = rows_of(items, 4, pad={"labels": -100})
    assert row["ids"].tolist() == [1, 2, 3, 0] and row["labels"].tolist() == [4, 5, 6, -100]
    assert set(row) == {"ids", "labels", "segment_ids", "position_ids"}
    assert rows_of(items, 4, drop_last=True) == []
    with pytest.raises(DataError, match="pad names 'label', which is not packed: ids, labels"):
        rows_of(items, 4, pad={"label": -100})
    assert len(rows_of([*items, *items], 3, drop_last=True)) == 2


def test_whole_documents_are_put_where_they_fit_best():
    rows = rows_of(documents([5, 4, 3, 2, 8]), 8, "fit", window=5)
    assert [row["tokens"].tolist() for row in rows] == [
        [0, 1, 2, 3, 4, 200, 201, 202],  # the oldest, and the longest for which there is room
        [100, 101, 102, 103, 300, 301, 0, 0],
        [400, 401, 402, 403, 404, 405, 406, 407],
    ]
    assert rows[1]["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 0, 0]
    assert rows[1]["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]


def test_documents_longer_than_a_row_are_cut_and_none_without_tokens_comes():
    rows = rows_of(documents([0, 11, 2, 0]), 4, "fit", window=2)
    assert sorted(tokens_of(rows)) == sorted(np.concatenate(documents([0, 11, 2, 0])).tolist())
    assert [row["tokens"].tolist() for row in rows[:2]] == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert rows[2]["position_ids"].tolist() == [0, 1, 2, 0]  # the rest of 3 leaves no room for 2
    assert rows_of(documents([0, 0]), 4) == rows_of([], 4) == []


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


@pytest.mark.parametrize("method", ["split", "fit"])
def test_it_is_the_same_everywhere(method):
    assert_same_everywhere(packed(method, batch=2))


@pytest.mark.parametrize("method", ["split", "fit"])
@pytest.mark.parametrize("lengths", [[30, 1, 0, 30, 2], [8, 8, 8], [0, 0, 5, 0], [1] * 20, [16, 17, 15, 40]])
def test_it_resumes_inside_long_documents_and_behind_empty_ones(method, lengths):
    assert_resumes_exactly(packed(method, window=2, lengths=lengths))


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 24), max_size=10),
    st.integers(2, 9),
    st.sampled_from(["split", "fit"]),
    st.integers(1, 9),
)
def test_random_documents_resume_exactly(lengths, length, method, window):
    assert_resumes_exactly(packed(method, length, window, lengths), epochs=1)


@pytest.mark.parametrize("method", ["split", "fit"])
def test_a_state_is_small_and_holds_no_tokens(method):
    graph = pg.Graph("g", seed=3)
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5, 1, 2000).astype(int).clip(1, 4000)
    source = graph.add(ops.FromSequence([np.full(n, 7) for n in lengths]))
    source.then(ops.Pack(2048, method))
    sizes = []
    with graph.loader() as loader:
        for _ in loader:
            sizes.append(len(json.dumps(loader.state_dict())))
    assert max(sizes) < 4000


def test_below_a_route_and_a_mixture_it_resumes_too():
    def make():
        graph = pg.Graph("g", seed=3)
        one = graph.add(ops.FromSequence(documents([5, 9, 2, 7, 0, 3] * 2)), name="one")
        other = graph.add(ops.FromSequence(documents([4, 4, 11] * 2)), name="other")
        mix = graph.add(ops.Mix([1, 2], stop="all"), one, other, name="mix")
        routed = mix.then(ops.Route(lambda x: len(x) % 2, 2), name="route")
        ends = [
            graph.add(ops.Pack(6, method, window=3), routed[i], name=f"pack{i}")
            for i, method in enumerate(("split", "fit"))
        ]
        graph.add(ops.Merge(), *ends, name="merge")
        return graph

    assert_resumes_exactly(make)


@pytest.mark.parametrize("method", ["split", "fit"])
def test_rows_may_be_worked_on_unordered_below_it(method):
    def make():
        graph = pg.Graph("g", seed=3)
        source = graph.add(ops.FromSequence(documents([40, 3, 9, 0, 25] * 2)))
        source.then(ops.Pack(6, method, window=3), name="pack").then(
            lambda row, rng: (row["tokens"], rng.integers(1000)), workers=3, ordered=False
        )
        return graph

    assert_resumes_exactly(make)


def test_below_an_unordered_stage_it_is_refused():
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(documents([3]))).then(lambda x: x, workers=2, ordered=False).then(ops.Pack(2))
    with pytest.raises(
        GraphError, match=r"stage 'pack': Pack takes items by their order, .* make it ordered=True"
    ):
        graph.plan()


def test_another_length_of_row_goes_on_where_the_oldest_document_lies():
    with packed("split", 8)().loader() as loader:
        passing = iter(loader)
        head = [next(passing) for _ in range(5)]
        state = loader.state_dict()
    with packed("split", 16)().loader() as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", PipegraphWarning)
        loader.load_state_dict(state, allow=["pack"])
        rest = list(loader)
    whole = sorted(t for item in documents(LENGTHS) for t in item.tolist())
    missing = set(whole) - set(tokens_of(head)) - set(tokens_of(rest))
    assert not missing  # and no more than the rest of one document comes twice
    assert len(tokens_of(head)) + len(tokens_of(rest)) - len(whole) < 13


@pytest.mark.parametrize("method", ["split", "fit"])
def test_memory_is_released_as_documents_leave(method):
    graph = pg.Graph("g")
    items = [np.zeros(n, np.int64) for n in [1000, 3000, 500] * 400]  # 14 MB in all
    graph.add(ops.FromSequence(items), capacity=4).then(ops.Pack(2048, method, window=8), capacity=4)
    with graph.loader(memory_limit="2 MB") as loader:
        assert len(list(loader)) > 800


# -- hostile documents -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"a": [1, 2], "b": [1]}], "field 'a' has 2 values and field 'b' has 1"),
        ([{"key": "x", "text": "words"}], "no field with a value per token"),
        (["text"], "field 'tokens' must be a list of numbers, an array or a tensor .* got str"),
        ([["a", "b"]], "field 'tokens' must be a list of numbers"),
        ([[1, None]], "field 'tokens' must be a list of numbers"),
        ([[2**70]], "field 'tokens' must be a list of numbers"),
        ([np.array(["a"])], "field 'tokens' must be a list of numbers"),
        ([np.float32(3)], "field 'tokens' must be a list of numbers"),
        (
            [np.zeros(2, np.int32), np.zeros(2, np.int64)],
            "holds int32 of .* in one document and int64",
        ),
        (
            [np.zeros((2, 3)), np.zeros((2, 4))],
            r"float64 of shape \(2, 3\) in one document and float64 of shape",
        ),
        ([{"a": [1]}, {"b": [1]}], "must have the same fields, got a and b"),
        ([{"a": 5}], "no field with a value per token"),
    ],
)
def test_documents_that_cannot_be_packed_are_named(items, message):
    with pytest.raises(DataError, match=message) as caught:
        rows_of(items, 4)
    assert any("stage 'pack'" in note for note in caught.value.__notes__)


def test_padding_that_the_dtype_cannot_hold_is_an_error():
    with pytest.raises(DataError, match="pad=-100 is no uint16"):
        rows_of([np.zeros(2, np.uint16)], 4, pad=-100)
    with pytest.raises(DataError, match="pad=0.5 is no int64"):
        rows_of([[1, 2]], 4, pad=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match="pad=nan is no int64"):
            rows_of([[1, 2]], 4, pad=float("nan"))
    assert rows_of([[0.5]], 2, pad=0.1)[0]["tokens"].tolist() == [0.5, 0.1]


def test_a_skipped_document_costs_no_other():
    def make():
        graph = pg.Graph("g")
        items = documents([3, 5, 2, 6, 4, 1, 3])
        items[3] = "no tokens"
        source = graph.add(ops.FromSequence(items))
        source.then(ops.Pack(4), name="pack", on_error=pg.Skip(2))
        return graph

    with make().loader() as loader:
        rows = list(loader)
        (lost,) = loader.profile().quarantined
    assert lost.position == 3 and len(tokens_of(rows)) == 18
    assert_resumes_exactly(make)


def test_other_kinds_of_numbers():
    (row,) = rows_of([torch.ones(2, 3, dtype=torch.float32)], 4)
    assert row["tokens"].shape == (4, 3) and row["tokens"].dtype == torch.float32
    (row,) = rows_of([np.arange(3, dtype=">u2")], 3)
    assert row["tokens"].tolist() == [0, 1, 2] and row["tokens"].dtype == torch.uint16
    (row,) = rows_of([[True, False]], 2)
    assert row["tokens"].dtype == torch.bool
    (row,) = rows_of([{"x": [np.int32(1), np.int32(2)], "y": [np.float32(1.5), 2]}], 2)
    assert row["x"].dtype == torch.int32 and row["x"].tolist() == [1, 2] and row["y"].tolist() == [1.5, 2]
    (row,) = rows_of([[1, np.int16(2), np.uint8(3)]], 3)
    assert row["tokens"].dtype == torch.int64 and row["tokens"].tolist() == [1, 2, 3]
    (row,) = rows_of([{"x": [], "y": []}, {"x": [1.5], "y": [2]}], 1)
    assert row["x"].dtype == torch.float64 and row["y"].dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "Pack: length must be an int >= 1, got 0"),
        ({"length": 2.0}, "Pack: length must be an int >= 1"),
        ({"length": 2, "method": "best"}, 'Pack: method must be "split" or "fit"'),
        ({"length": 2, "window": 0}, "Pack: window must be an int >= 1"),
        ({"length": 2, "fields": []}, "Pack: fields must be names"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(GraphError, match=message):
        ops.Pack(**arguments)


def test_a_batch_of_rows_has_a_row_for_each():
    graph = pg.Graph("g")
    source = graph.add(ops.FromIterable(documents([3, 5, 2, 6])))
    source.then(ops.Pack(4)).then(ops.Batch(2)).then(ops.Unbatch())
    with graph.loader() as loader:
        assert len(list(loader)) == 4
        with pytest.raises(TypeError):
            len(loader)


@pytest.mark.parametrize("at_once", [1, 12, 1 << 16])
@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_rows_are_the_same_however_many_are_cut_at_once(monkeypatch, at_once, backend):
    monkeypatch.setattr(packing, "AT_ONCE", at_once)
    lengths = np.random.default_rng(5).integers(0, 40, 200).tolist()
    tokens = np.concatenate([np.full(length, number) for number, length in enumerate(lengths)])
    graph = pg.Graph("packed")
    source = graph.add(ops.FromSequence([np.full(n, i) for i, n in enumerate(lengths)]), backend=backend)
    source.then(ops.Pack(6), name="pack", backend=backend).then(ops.Batch(5), name="batch")
    assert (backend == "thread") == (graph.plan().stages["pack"].bundle_rows > 1)
    with graph.loader() as loader:
        rows = [row for batch in loader for row in zip(*(batch[k] for k in batch), strict=True)]
    flat, segments, positions = (torch.cat(part).numpy() for part in zip(*rows, strict=True))
    assert np.array_equal(flat[: len(tokens)], tokens) and not flat[len(tokens) :].any()
    for row in range(len(rows)):
        of_row = slice(6 * row, min(6 * row + 6, len(tokens)))
        begins = np.flatnonzero(np.diff(tokens[of_row], prepend=-1))
        sizes = np.diff(np.append(begins, len(tokens[of_row])))
        assert np.array_equal(np.repeat(np.arange(1, len(sizes) + 1), sizes), segments[of_row])
        assert np.array_equal(np.concatenate([np.arange(size) for size in sizes]), positions[of_row])


def test_rows_of_a_source_that_is_read_by_two_ways_resume_below_a_completion_order_stage():
    def make():
        graph = pg.Graph("twice")
        source = graph.add(ops.FromSequence([{"tokens": list(range(i, i + 3))} for i in range(5)]))
        packed = graph.add(ops.Concat(), source, source).then(ops.Pack(1), capacity=2)
        packed.then(lambda row: int(row["tokens"][0]), ordered=False)
        return graph

    with make().loader() as loader:
        everything = sorted(loader)
    for steps in (1, 2, 7, 15, 16, 29):
        with make().loader() as loader:
            head = list(itertools.islice(loader, steps))
            state = loader.state_dict()
        with make().loader() as loader:
            loader.load_state_dict(state)
            assert sorted(head + list(loader)) == everything


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices_are_packed_as_the_arrays_that_they_are():
    (row,) = rows_of([{"ids": np.asmatrix(np.arange(4)).T}], length=4)
    assert row["ids"].tolist() == [[0], [1], [2], [3]]


def test_a_field_that_pack_makes_is_refused():
    graph = pg.Graph("taken")
    graph.add(ops.FromIterable([{"tokens": [1, 2], "segment_ids": [7, 7]}])).then(ops.Pack(4))
    with (
        graph.loader() as loader,
        pytest.raises(pg.PipegraphError, match="'segment_ids' is one that Pack makes"),
    ):
        list(loader)
