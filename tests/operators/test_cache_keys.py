"""What a folder of a Cache takes for another function, so that it gives nothing that this one has not made."""

import argparse
import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


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


def reads_a_number(x):
    return x * BY


def reads_settings(x):
    return x * SETTINGS.by


def reads_arguments(x):
    return x * ARGUMENTS.by


def reads_within(x):
    return sum([x * each for each in TABLE])


def reads_through_another(x):
    return reads_a_number(x)


def by_array(by, x):
    return x * int(by[0])


def by_settings(settings, x):
    return x * settings.by


def closing_over(settings):
    return lambda x: x * settings.by


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
}


@pytest.mark.parametrize("make", CARRIED.values(), ids=CARRIED)
def test_what_a_function_carries_tells_it_from_another(tmp_path, make):
    assert values(make(2), tmp_path) == [2, 4, 6]
    files = sorted(tmp_path.rglob("*.pgv"))
    assert values(make(2), tmp_path) == [2, 4, 6]
    assert sorted(tmp_path.rglob("*.pgv")) == files
    assert values(make(3), tmp_path) == [3, 6, 9]


@pytest.mark.parametrize(
    "function", [reads_a_number, reads_settings, reads_arguments, reads_within, reads_through_another]
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
    assert values(function, tmp_path) == [3, 6, 9]


def test_a_folder_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert values(Hidden(2), "~/kept") == [2, 4, 6]
    assert list((tmp_path / "kept").rglob("*.pgv"))
