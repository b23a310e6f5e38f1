"""Exceptions of users that cannot be noted, shown, or taken for true."""

import dataclasses

import pytest

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
