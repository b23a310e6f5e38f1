"""Classes that worker processes cannot import, as those of a script are: objects of them come and go as they are."""

import dataclasses

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


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


def test_an_open_text_file_is_refused_and_the_attribute_named(tmp_path):
    (tmp_path / "lines.txt").write_text("ä\nb\n", encoding="utf-8")

    class Lines:
        def __init__(self, file):
            self.file = file

        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise AssertionError("never read")

    graph = pg.Graph("files")
    with open(tmp_path / "lines.txt", encoding="utf-8") as file:
        graph.add(ops.FromSequence(Lines(file)), backend="process")
        with graph.loader() as loader, pytest.raises(GraphError, match=r"dataset\.file"):
            next(iter(loader))
