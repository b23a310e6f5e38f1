"""Classes that worker processes cannot import, as those of a script are: objects of them come and go as they are."""

import dataclasses
import warnings
from collections import namedtuple
from typing import NamedTuple

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def classes():
    """Classes that no other process can import."""

    @dataclasses.dataclass
    class Plain:
        a: int
        scale = 1

        def name(self):
            return "as defined"

    @dataclasses.dataclass(slots=True)
    class Slotted:
        a: int

    class Odd(ValueError):
        seen = 0

    return Plain, Slotted, Odd


def test_what_the_loop_sets_on_a_class_stays_when_objects_of_it_arrive():
    plain, _, odd = classes()

    def make(number):
        if number == 3:
            raise odd(number)
        return plain(number)

    graph = pg.Graph("classes")
    graph.add(ops.FromSequence(range(4)), capacity=1).then(make, capacity=1, backend="process")
    with graph.loader() as loader:
        batches = iter(loader)
        assert next(batches) == plain(0)
        plain.scale, plain.name, odd.seen = 5, lambda self: "changed", 7
        assert [next(batches), next(batches)] == [plain(1), plain(2)]
        with pytest.raises(odd):
            next(batches)
    assert (plain.scale, plain(0).name(), odd.seen) == (5, "changed", 7)


def test_objects_with_slots_cross_both_ways():
    _, slotted, _ = classes()

    def unchanged(sample):
        assert not hasattr(sample, "__dict__")
        return sample

    graph = pg.Graph("slots")
    graph.add(ops.FromSequence([slotted(1), slotted(2)])).then(unchanged, backend="process").then(
        ops.Batch(2)
    )
    with graph.loader() as loader:
        (batch,) = loader
    assert type(batch) is slotted
    assert batch.a.tolist() == [1, 2]


def test_named_tuples_cross_both_ways():

    class Point(NamedTuple):
        x: int
        y: int = 5

    class Named(namedtuple("Named", "x")):
        __slots__ = ()

    graph = pg.Graph("tuples")
    graph.add(ops.FromSequence([Point(1), Named(2)])).then(lambda sample: sample, backend="process")
    with graph.loader() as loader:
        found = list(loader)
    assert list(map(type, found)) == [Point, Named]
    assert found == [(1, 5), (2,)]


def test_objects_that_nobody_changed_are_not_told_of_as_changed():
    plain, _, _ = classes()
    graph = pg.Graph("unchanged")
    graph.add(ops.FromSequence([plain(1), plain(2)]), backend="process").then(ops.Batch(2))
    with warnings.catch_warnings(), graph.loader(epochs=2) as loader:
        warnings.simplefilter("error")
        for _ in range(2):
            assert [batch.a.tolist() for batch in loader] == [[1, 2]]


step = 0


def advance(sample):
    return dataclasses.replace(sample, a=sample.a.step if hasattr(sample.a, "step") else sample.a)


def test_a_global_of_an_attributes_name_is_not_what_a_function_reads():
    global step
    plain, _, _ = classes()
    graph = pg.Graph("attribute")
    graph.add(ops.FromSequence([plain(1)])).then(advance, backend="process")
    with warnings.catch_warnings(), graph.loader(epochs=2) as loader:
        warnings.simplefilter("error")
        for step in range(2):  # noqa: B007
            assert list(loader) == [plain(1)]
