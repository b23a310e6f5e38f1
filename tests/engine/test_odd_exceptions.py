"""Exceptions of users that cannot be noted, shown, or taken for true."""

import dataclasses

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.usefixtures("no_leaks")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute, notes too."""

    code: int


class Unshown(Exception):
    """Cannot be printed."""

    def __str__(self):
        raise ZeroDivisionError("in __str__")

    __repr__ = __str__


class Refuses(Exception):
    """Has a way of its own with notes."""

    def add_note(self, note):
        raise RuntimeError("no notes")


class Empty(Exception):
    """Is false."""

    def __bool__(self):
        return False


class Opaque(Exception):
    """Refuses even to be asked for an attribute."""

    def __getattr__(self, name):
        raise KeyError(name)

    def __setattr__(self, name, value):
        raise KeyError(name)


class Uncountable(Exception):
    """Its notes are no list."""

    __notes__ = "none"


ODD = [Frozen(3), Unshown("x"), Refuses(), Empty(), Opaque(), Uncountable()]
PLACEMENTS = [{"backend": "inline"}, {"workers": 1}, {"workers": 3}, {"workers": 3, "ordered": False}]
odd = pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
placed = pytest.mark.parametrize("placement", PLACEMENTS, ids=str)


def failing(error, at=3, items=8, **options):
    def work(x):
        if x == at:
            raise error
        return x

    graph = pg.Graph("odd")
    graph.add(ops.FromIterable(range(items)), name="source").then(work, name="work", **options)
    return graph


def collect(graph):
    got = []
    with graph.loader() as loader:
        try:
            for item in loader:
                got.append(item)
        except Exception as caught:
            return got, caught, loader
    return got, None, loader


@odd
@placed
def test_an_odd_exception_is_raised_as_itself_after_what_came_before_it(error, placement):
    got, caught, _ = collect(failing(error, **placement))
    assert caught is error
    if placement.get("ordered", True):
        assert got == [0, 1, 2]


@odd
@placed
def test_an_odd_exception_is_skipped_like_any_other(error, placement):
    got, caught, loader = collect(failing(error, on_error=pg.Skip(), **placement))
    assert caught is None and sorted(got) == [0, 1, 2, 4, 5, 6, 7]
    (left_out,) = loader.profile().quarantined
    assert left_out.error.startswith(type(error).__name__)
    str(loader.profile())


@odd
def test_an_odd_exception_passes_through_retries_budgets_batches_and_flat_maps(error):
    assert collect(failing(error, on_error=pg.Retry(1)))[1] is error
    assert collect(failing(error, on_error=pg.Skip(0)))[1] is error

    def refuse(*_):
        raise error

    for operator in (
        ops.Batch(3, collate=refuse),
        ops.FlatMap(refuse),
        ops.Filter(refuse),
        ops.Route(refuse, 1),
    ):
        graph = pg.Graph("odd")
        graph.add(ops.FromIterable(range(8))).then(operator, name="work")
        assert collect(graph)[1] is error
    graph = pg.Graph("odd")
    graph.add(ops.FromIterable(refuse))
    assert collect(graph)[1] is error


def test_a_note_is_kept_even_by_an_exception_that_refuses_attributes():
    _, caught, _ = collect(failing(Frozen(4)))
    assert caught.__notes__ == ["pipegraph: stage 'work', sample 3 at position 3, epoch 0"]


@odd
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_an_odd_exception_of_open_or_close_names_its_stage(error, backend):
    class Opens(pg.Operator):
        def open(self, context):
            raise error

        def process(self, chunk):
            return chunk

    class Closes(pg.Operator):
        def process(self, chunk):
            return chunk

        def close(self):
            raise error

    def graph(operator):
        graph = pg.Graph("odd")
        graph.add(ops.FromIterable(range(3))).then(operator, name="bad", backend=backend)
        return graph

    with graph(Opens()).loader() as loader, pytest.raises(type(error)) as caught:
        list(loader)
    assert caught.value is error
    loader = graph(Closes()).loader()
    list(loader)
    with pytest.warns(
        pg.errors.PipegraphWarning, match=rf"stage 'bad': close\(\) raised {type(error).__name__}"
    ):
        loader.close()


def test_a_key_that_cannot_be_shown_does_not_hide_the_error():
    class Key:
        def __repr__(self):
            raise ZeroDivisionError("in __repr__")

    def items():
        return iter([{"key": Key(), "x": 1}])

    def fail(sample):
        raise ValueError("the error")

    for policy in ("raise", pg.Skip(0), pg.Skip()):
        graph = pg.Graph("odd")
        graph.add(ops.FromIterable(items)).then(fail, name="work", on_error=policy)
        _, caught, loader = collect(graph)
        if policy == pg.Skip():
            assert caught is None
            str(loader.profile())
            loader.state_dict()
        else:
            assert isinstance(caught, ValueError)


@pytest.mark.parametrize(
    ("value", "start", "end"),
    [
        (
            {f"/data/{n}.jpg": n for n in range(200)},
            "{'/data/0.jpg': 0, '/data/1.jpg': 1, ",
            "… (200 in all)",
        ),
        ("x" * 12_345, "'xxx", "x… (12,345 characters)"),
        (np.array("x" * 300), "array('xxx", "x… (330 characters)"),
        (torch.nn.Sequential(*map(torch.nn.Identity, range(20))), "Sequential(", " characters)"),
        ({"s3://key:" + "s" * 300 + "@host": 0}, "{'s3://host': 0}", ""),
    ],
)
def test_of_a_long_value_an_error_shows_the_beginning_and_the_length(value, start, end):
    with pytest.raises(pg.errors.GraphError, match="ListFiles: classes must be .*, got ") as raised:
        ops.ListFiles("folder", classes=value)
    text = str(raised.value).partition(", got ")[2]
    assert text.startswith(start) and text.endswith(end)
    assert len(text) < 240


def test_the_error_for_a_missing_part_can_be_copied_and_pickled():
    import copy
    import pickle

    error = pg.errors.MissingExtraError("cv2", "images", "DecodeImage")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(other) == str(error)
        assert other.extra == "images"


class Coded(Exception):
    """Its ``__init__`` wants more than ``args`` has."""

    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


class Wrapping(Exception):
    def __init__(self, inner):
        super().__init__(inner)
        self.inner = inner


class Unrepresentable:
    def __repr__(self):
        raise ZeroDivisionError("in __repr__")

    def __reduce__(self):
        raise ZeroDivisionError("in __reduce__")


def from_a_process(make):
    def fail(x):
        raise make()

    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(2))).then(fail, backend="process")
    with graph.loader() as loader, pytest.raises(type(make())) as raised:
        list(loader)
    return raised.value


def test_exceptions_within_an_exception_cross_processes_as_themselves():
    group = from_a_process(
        lambda: ExceptionGroup("two", [ExceptionGroup("one", [Coded("a", 7)]), ValueError(3)])
    )
    assert [type(each) for each in group.exceptions] == [ExceptionGroup, ValueError]
    assert type(group.exceptions[0].exceptions[0]) is Coded and group.exceptions[0].exceptions[0].code == 7

    wrapping = from_a_process(lambda: Wrapping(Coded("a", 7)))
    assert type(wrapping.inner) is Coded and wrapping.inner.code == 7
    assert from_a_process(lambda: Wrapping(Unrepresentable())).args == ("a Unrepresentable",)

    def circle():
        error = Coded("a", 7)
        error.within = Wrapping(error)
        return error

    assert from_a_process(circle).code == 7
