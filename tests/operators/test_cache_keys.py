"""What a folder of a Cache takes for another function, so that it gives nothing that this one has not made."""

import argparse
import dataclasses
import functools
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


@dataclasses.dataclass
class Settings:
    by: int


class Hidden:
    def __init__(self, by):
        self._by = by

    def __call__(self, x):
        return x * self._by


class Given(Slotted):
    """Reads its factor from what it was given."""

    def __call__(self, x):
        return x * int(str(self.by))


BY = 2
SETTINGS = Settings(2)
ARGUMENTS = argparse.Namespace(by=2)
TABLE = [2]
CONFIG = types.ModuleType("config_of_keys")
CONFIG.by = 2


def reads_a_number(x):
    return x * BY


def reads_settings(x):
    return x * SETTINGS.by


def reads_arguments(x):
    return x * ARGUMENTS.by


def reads_within(x):
    return sum([x * each for each in TABLE])


def reads_a_module(x):
    return x * CONFIG.by


def reads_through_another(x):
    return reads_a_number(x)


def by_array(by, x):
    return x * int(by[0])


def by_settings(settings, x):
    return x * settings.by


def closing_over(settings):
    return lambda x: x * settings.by


def reading(value, read):
    return lambda x: x * int(read(value))


class Marked(np.ndarray):
    """An array with an attribute."""


def marked(by):
    array = np.zeros(1).view(Marked)
    array.by = by
    return array


def one_of_two(which):
    two = [[0], [0]]
    return [*two, two[which - 2]]


SEEDED = {random.Random(by).getstate(): by for by in (2, 3)}


def values(function, folder):
    graph = pg.Graph("keys")
    graph.add(ops.FromSequence(range(1, 4))).then(function, name="made").then(ops.Cache(folder, "1 MB"))
    with graph.loader() as loader:
        return list(loader)


CARRIED = {
    "long list by partial": lambda by: functools.partial(by_array, 1000 * [by]),
    "slots": Slotted,
    "private": Hidden,
    "path": lambda by: Given(Path(str(by))),
    "number of NumPy": lambda by: Given(np.int64(by)),
    "array by partial": lambda by: functools.partial(by_array, np.array([by])),
    "tensor by partial": lambda by: functools.partial(by_array, torch.tensor([by])),
    "object by partial": lambda by: functools.partial(by_settings, Settings(by)),
    "object in closure": lambda by: closing_over(Settings(by)),
    "namespace in closure": lambda by: closing_over(argparse.Namespace(by=by)),
    "sparse tensor": lambda by: reading(torch.tensor([by]).to_sparse(), lambda value: value.to_dense()[0]),
    "mask": lambda by: reading(np.ma.array([2, 3], mask=[by == 3, by == 2]), lambda value: value.sum()),
    "attribute of an array": lambda by: reading(marked(by), lambda value: value.by),
    "seeded": lambda by: reading(random.Random(by), lambda value: SEEDED[value.getstate()]),
    "module": lambda by: reading(types.ModuleType(f"of_{by}"), lambda value: value.__name__[-1]),
    "method of a mapping": lambda by: reading({0: by}.get, lambda value: value(0)),
    "keys of a mapping": lambda by: reading({by: 0}.keys(), min),
    "ufunc": lambda by: reading(np.add if by == 2 else np.multiply, lambda value: 2 + (value is np.multiply)),
    "image": lambda by: reading(Image.new("L", (1, 1), by), lambda value: value.getpixel((0, 0))),
    "class": lambda by: reading(
        type("Of", (), {"by": (lambda self: 2) if by == 2 else (lambda self: 3)}), lambda value: value().by()
    ),
    "same object twice": lambda by: reading(one_of_two(by), lambda value: 2 + (value[2] is value[1])),
}


@pytest.mark.parametrize("make", CARRIED.values(), ids=CARRIED)
def test_what_a_function_carries_tells_it_from_another(tmp_path, make):
    assert values(make(2), tmp_path) == [2, 4, 6]
    files = sorted(tmp_path.rglob("*.pgv"))
    assert values(make(2), tmp_path) == [2, 4, 6]
    assert sorted(tmp_path.rglob("*.pgv")) == files
    assert values(make(3), tmp_path) == [3, 6, 9]


@pytest.mark.parametrize(
    "function",
    [reads_a_number, reads_settings, reads_arguments, reads_within, reads_a_module, reads_through_another],
)
def test_the_globals_that_a_function_reads_tell_it_from_another(tmp_path, monkeypatch, function):
    assert values(function, tmp_path) == [2, 4, 6]
    files = sorted(tmp_path.rglob("*.pgv"))
    assert values(function, tmp_path) == [2, 4, 6]
    assert sorted(tmp_path.rglob("*.pgv")) == files
    for name, value in {
        "BY": 3,
        "SETTINGS": Settings(3),
        "ARGUMENTS": argparse.Namespace(by=3),
        "TABLE": [3],
    }.items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(CONFIG, "by", 3)
    assert values(function, tmp_path) == [3, 6, 9]


def test_a_folder_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert values(Hidden(2), "~/kept") == [2, 4, 6]
    assert list((tmp_path / "kept").rglob("*.pgv"))


def test_a_cache_refuses_what_can_be_read_only_once():
    graph = pg.Graph()
    made = graph.add(ops.FromSequence(range(3))).then(lambda x: (y for y in range(x)), name="made")
    made.then(ops.Cache("memory", "1 MB"), name="kept")
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="Cache: a result is or contains .*; return a list"),
    ):
        list(loader)
