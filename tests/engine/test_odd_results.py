"""What operators and orders of users give back is counted and compared: nothing hangs, nothing is lost or doubled."""

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk, Failure
from pipegraph.engine.contents import Contents
from pipegraph.errors import GraphError


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_an_expanding_operator_that_gives_one_chunk_twice_is_refused(backend):
    class Twice(pg.Operator):
        kind = "expand"
        one_to_one = False

        def process(self, chunk):
            child = chunk.child(0, chunk.data)
            return [child, child]

    graph = pg.Graph("twice")
    graph.add(ops.FromSequence(range(10))).then(Twice(), name="twice", backend=backend)
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="stage 'twice': process made two items of one identity"),
    ):
        list(loader)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_row_of_a_batch_that_is_given_twice_is_refused(backend):
    class Twice(pg.Operator):
        kind = "expand"
        one_to_one = False

        def process(self, chunk):
            row = chunk.row(0, chunk.data[0])
            return [row, row]

    graph = pg.Graph("twice")
    batches = graph.add(ops.FromSequence(range(10))).then(ops.Batch(5, collate=list))
    batches.then(Twice(), name="twice", backend=backend)
    with graph.loader() as loader, pytest.raises(GraphError, match="'twice': process gave one chunk twice"):
        list(loader)


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
@pytest.mark.parametrize("way", ["replace", "child"])
def test_an_expanding_operator_that_gives_two_items_one_identity_is_refused(way, backend):
    class Same(pg.Operator):
        kind = "expand"
        one_to_one = False

        def process(self, chunk):
            for number in range(2):
                data = chunk.data, number
                yield chunk.replace(data) if way == "replace" else chunk.child(0, data)

    graph = pg.Graph("same")
    graph.add(ops.FromSequence(range(10)), name="numbers").then(Same(), name="same", backend=backend)
    said = r"'same': process made two items of one identity, 'numbers' 0.*chunk.child\(index, data\)"
    with graph.loader() as loader, pytest.raises(GraphError, match=said):
        list(loader)


def test_rows_of_a_batch_in_which_a_sample_is_twice_may_be_taken_apart():
    graph = pg.Graph("twice")
    repeated = graph.add(ops.FromSequence([7])).then(ops.Repeat(3))
    repeated.then(ops.Batch(3, collate=list)).then(ops.Unbatch())
    with graph.loader() as loader:
        assert list(loader) == [7, 7, 7]


class Late(pg.Operator):
    """Returns the chunk before the one that it is given, and has no state."""

    one_to_one = False

    def __init__(self):
        self.held = None

    def process(self, chunk):
        before, self.held = self.held, chunk
        return before


class LateFromItself(Late):
    """As above; the first chunk is returned twice."""

    one_to_one = True

    def process(self, chunk):
        before, self.held = self.held or chunk, chunk
        return before


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
@pytest.mark.parametrize("kind", [Late, LateFromItself])
def test_a_map_that_returns_an_earlier_chunk_is_refused(kind, backend):
    graph = pg.Graph("late")
    graph.add(ops.FromSequence(range(6)), name="numbers").then(kind(), name="late", backend=backend)
    seen = []
    said = "'late': process was given the sample of 'numbers' at position 1 and returned .* at position 0.*a state"
    with graph.loader() as loader, pytest.raises(GraphError, match=said):
        seen.extend(loader)
    assert seen == ([] if kind is Late else [0])


class Child(pg.Operator):
    def process(self, chunk):
        return chunk.child(0, chunk.data)


@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_a_map_that_returns_a_child_is_told_what_it_did(backend):
    graph = pg.Graph("child")
    graph.add(ops.FromSequence(range(6)), name="numbers").then(Child(), name="child", backend=backend)
    said = (
        "stage 'child': process returned child 0 of the sample of 'numbers' at position 0, which is a sample of its own, "
        r"where a map .*Return chunk\.replace\(data\)\..* kind = 'expand'"
    )
    with graph.loader() as loader, pytest.raises(GraphError, match=said):
        list(loader)


def test_a_map_with_a_state_may_hold_a_chunk_back():
    class Kept(Late):
        def state_dict(self):
            return {"held": self.held}

        def load_state_dict(self, state):
            self.held = state["held"]

    def make():
        graph = pg.Graph("kept")
        graph.add(ops.FromSequence(range(80))).then(Kept())
        return graph

    pg.testing.assert_resumes_exactly(make)


def test_a_map_may_leave_out_rows_of_a_batch():
    class Odd(pg.Operator):
        def process(self, chunk):
            rows = [row for row in range(len(chunk)) if chunk.data[row] % 2]
            return pg.Chunk.group(
                [chunk.row(row, chunk.data[row]) for row in rows], [chunk.data[row] for row in rows]
            )

    graph = pg.Graph("odd")
    graph.add(ops.FromSequence(range(8))).then(ops.Batch(4, collate=list)).then(Odd(), name="odd")
    with graph.loader() as loader:
        assert list(loader) == [[1, 3], [5, 7]]


class Drawing(pg.order.Order):
    """Draws what it is told to."""

    def __init__(self, drawn):
        self.drawn = drawn

    def config(self):
        return {"order": "drawing"}

    def draw(self, layout, positions, seed, epoch):
        return self.drawn


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (np.zeros(1, np.int64), r"one sample for each position \(shape \(5,\)\), got int64 of shape \(1,\)"),
        (np.zeros(9, np.int64), r"got int64 of shape \(9,\)"),
        (np.zeros(5), r"an array of integers .*, got float64"),
        ([0, 1, 2, 3, 4], r"got \[0, 1, 2, 3, 4\]"),
        (np.arange(-2, 3), "samples from 0 on, got -2"),
    ],
    ids=["too few", "too many", "no integers", "a list", "negative"],
)
def test_an_order_that_draws_other_than_one_sample_per_position_is_refused(drawn, said):
    with pytest.raises(GraphError, match=said):
        Drawing(drawn).samples_at(5, np.arange(5))


@pytest.mark.parametrize("results", [[], [1, 1]], ids=["none", "two"])
def test_an_operator_of_bundles_gives_one_result_for_each_sample(results):
    class Odd(pg.Operator):
        traits = pg.Traits(blocks=True)

        def work_into(self, made, bundle, start):
            for _ in bundle.data[start:]:
                made.extend(results)

        def process(self, chunk):
            return chunk

    graph = pg.Graph("odd")
    graph.add(ops.FromSequence(range(50))).then(Odd(), name="odd").then(ops.Batch(5, collate=list))
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="stage 'odd': Odd gave .* results for .* samples"),
    ):
        list(loader)


@pytest.mark.parametrize("on_error", ["raise", pg.Skip()], ids=["raise", "skip"])
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_what_fails_after_the_last_sample_of_a_bundle_is_raised_as_itself(backend, on_error):
    class Late(pg.Operator):
        traits = pg.Traits(blocks=True)

        def work_into(self, made, bundle, start):
            made.extend(bundle.data[start:])
            raise LookupError("after the last")

        def process(self, chunk):
            return chunk

    graph = pg.Graph("late")
    graph.add(ops.FromSequence(range(50))).then(Late(), name="late", backend=backend, on_error=on_error)
    with graph.loader() as loader, pytest.raises(LookupError, match="after the last") as caught:
        list(loader)
    assert any("stage 'late', after the last sample of a bundle" in each for each in caught.value.__notes__)


def test_a_failure_of_an_epoch_that_was_cut_short_is_not_one_of_the_next():
    """It was in the queue already, behind the item at which all ranks ended."""
    contents = Contents(8, None, False, 1, None)
    late = Failure(ValueError("late"), 0)
    first, second = (Chunk(data, ((0, data),), data) for data in (0, 1))
    contents.ready.extend([first, late, second])
    contents.held = 2
    assert contents.take_out(0) == [first]
    assert list(contents.ready) == [second] and contents.held == 1


class Bare(pg.Source):
    """Yields its items without their positions."""

    def __init__(self, items):
        self.items = items

    def length(self, epoch, rank, world_size):
        return len(self.items)

    def iterate(self, epoch, rank, world_size, start):
        return iter(self.items[start:])


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("items", [[5, 6, 7], ["ab", "cd"], [{"a": 1, "b": 2}], [(0, "whole"), "not"]])
def test_a_source_that_yields_bare_items_is_told_so(items, backend):
    graph = pg.Graph("bare")
    graph.add(Bare(items), name="rows", backend=backend)
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match=r"stage 'rows': iterate must yield \(position, item\), .*, got "),
    ):
        list(loader)


def test_positions_that_are_no_numbers_are_refused():
    class Rows(Bare):
        random_access = True

        def positions(self, epoch, rank, world_size, start):
            return iter(self.items[start:])

        def read(self, position, epoch):
            return position

    graph = pg.Graph("named")
    graph.add(Rows(["a", "b"]), name="rows")
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match=r"stage 'rows': positions must yield whole numbers, got 'a'"),
    ):
        list(loader)


class Nothing(pg.Source):
    def length(self, epoch, rank, world_size):
        return 3


class NoRead(Nothing):
    random_access = True

    def positions(self, epoch, rank, world_size, start):
        return iter(range(start, 3))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            Nothing,
            r"stage 'rows': Nothing lacks iterate\(epoch, rank, world_size, start\), .*random_access = True",
        ),
        (
            NoRead,
            r"stage 'rows': NoRead has random_access = True, but lacks read: define .*read\(position, epoch\)",
        ),
    ],
)
def test_a_source_with_nothing_to_read_is_refused_by_the_plan(source, text):
    graph = pg.Graph("nothing")
    graph.add(source(), name="rows")
    with pytest.raises(GraphError, match=text):
        graph.plan()


def test_a_source_with_positions_and_read_may_be_read_in_sequence():
    class Rows(NoRead):
        random_access = False

        def read(self, position, epoch):
            return position

    graph = pg.Graph("in sequence")
    graph.add(Rows())
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2]


class Expands(pg.Operator):
    kind = "expand"
    one_to_one = False

    def __init__(self, number):
        self.number = number

    def process(self, chunk):
        return chunk if self.number is None else self.number


class Regroups(pg.Regroup):
    def __init__(self, number):
        self.number = number

    def process(self, chunk):
        return chunk if self.number is None else self.number


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("kind", [Expands, Regroups])
@pytest.mark.parametrize(("number", "got"), [(None, "Chunk"), (7, "int")])
def test_process_that_should_give_several_chunks_and_gives_none_is_told_so(kind, number, got, backend):
    graph = pg.Graph("several")
    source = graph.add(ops.FromIterable(range(3)))
    graph.add(kind(number), source, name="work", backend=backend)
    with (
        graph.loader() as loader,
        pytest.raises(
            TypeError, match=f"must return an iterable of chunks, got {got}: return \\[chunk\\]"
        ) as failed,
    ):
        list(loader)
    assert "stage 'work'" in failed.value.__notes__[0]


class Tokens:
    """Windows of a map; what NumPy computes from one is of its class too, without a file."""

    def __init__(self, path, made):
        self.path, self.made = path, made

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.made(np.memmap(self.path, np.uint16, mode="r")[index : index + 8])


def as_int64(window):
    return window.astype(np.int64)


def doubled(window):
    return window * 2


def as_it_is(window):
    return window


@pytest.mark.parametrize("batched", [False, True], ids=["rows", "batches"])
@pytest.mark.parametrize("made", [as_int64, doubled, as_it_is])
@pytest.mark.parametrize("backend", ["inline", "thread", "process"])
def test_what_is_computed_from_a_memory_map_is_an_array_like_others(tmp_path, backend, made, batched):
    (path := tmp_path / "tokens.bin").write_bytes(np.arange(100, dtype=np.uint16).tobytes())
    graph = pg.Graph("tokens")
    node = graph.add(ops.FromSequence(Tokens(path, made)), backend=backend)
    if batched:
        node.then(ops.Batch(4))
    with graph.loader() as loader:
        rows = [np.asarray(row) for data in loader for row in (data if batched else [data])]
    expected = [made(np.arange(index, index + 8, dtype=np.uint16)) for index in range(40)]
    assert np.array_equal(rows, expected) and rows[0].dtype == expected[0].dtype


class Cut(np.ndarray):
    """A user's array that knows less than NumPy's: nothing looks at it but the user."""

    @property
    def flags(self):
        raise AttributeError("no flags")


@pytest.mark.parametrize("source", [ops.FromSequence, ops.FromIterable])
def test_an_array_that_behaves_unlike_its_class_is_delivered_unchecked(source):
    graph = pg.Graph("cut")
    data = [np.arange(3).view(Cut) for _ in range(20)]
    graph.add(source(data)).then(lambda row: (row + 1).view(Cut))
    with graph.loader() as loader:
        for _ in range(2):
            assert [np.ndarray.tolist(row) for row in loader] == [[1, 2, 3]] * 20


def forgets(item):
    item["x"] += 1


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_function_that_returns_none_is_named(backend, caplog):
    graph = pg.Graph("none")
    graph.add(ops.FromSequence([{"x": 1}] * 3)).then(forgets, name="add", backend=backend)
    with graph.loader() as loader:
        assert list(loader) == [None] * 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("stage 'add': forgets returned None for its first item")
    assert "without a return?" in said and "ops.Filter" in said
    caplog.clear()
    some = pg.Graph("some")  # a field that some samples lack is no mistake
    some.add(ops.FromSequence([{"x": 1}, {}])).then(lambda item: item.get("x"), backend=backend)
    with some.loader() as loader:
        assert list(loader) == [1, None]
    assert not caplog.records
