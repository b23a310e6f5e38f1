"""What counts as a container, what mapping over one keeps, and in which order its leaves come."""

import os
import sys
import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest

from pipegraph.tree import copy_containers, leaves, map_leaves

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Sample:
    image: int
    label: int

    def __post_init__(self):
        assert self.image < 10, "checks of samples do not run on what is made of them"


class Fields(dict):
    pass


class Rows(list):
    pass


@pytest.mark.parametrize(
    "data",
    [
        {"b": 1, "a": 2},
        [1, 2],
        (1, 2),
        Point(1, 2),
        Sample(1, 2),
        OrderedDict(b=1, a=2),
        defaultdict(int, b=1, a=2),
        UserDict(b=1, a=2),
        Fields(b=1, a=2),
        Rows([1, 2]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_mapping_keeps_types_and_order(data):
    nested = {"z": [data], "a": None}
    assert list(leaves(nested)) == [1, 2, None]
    made = map_leaves(lambda leaf: leaf and 10 * leaf, nested)
    assert type(made["z"][0]) is type(data)
    assert list(leaves(made)) == [10, 20, None]
    assert list(leaves(nested)) == [1, 2, None]


def test_other_mappings_become_dicts_and_other_tuples_stay():
    assert map_leaves(str, MappingProxyType({"a": 1})) == {"a": "1"}
    assert type(map_leaves(int, time.gmtime(0))) is time.struct_time


class Sentence(list):
    """Made of something else than its items, and with an attribute."""

    def __init__(self, text):
        super().__init__(text.split())
        self.text = text


class Box(tuple):
    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))


class Square(namedtuple("Square", "side area")):
    def __new__(cls, side):
        return super().__new__(cls, side, side * side)


def labelled():
    made = Square(3)
    made.label = 7
    return made


ODD = [
    Sentence("a bc"),
    Box(1, 2),
    labelled(),
    os.stat("."),
    time.localtime(),
    sys.version_info,
]


@pytest.mark.parametrize("data", ODD, ids=lambda data: type(data).__name__)
def test_copies_of_odd_containers_are_as_they_were(data):
    (copied,) = copy_containers([data])
    assert type(copied) is type(data)
    assert copied == data
    assert (copied is not data) == hasattr(data, "__dict__")
    for name in ("text", "label", "st_mtime_ns", "st_blksize", "tm_zone"):
        assert getattr(copied, name, None) == getattr(data, name, None)


def test_odd_containers_keep_what_else_they_hold_when_their_leaves_change():
    made = map_leaves(lambda leaf: leaf * 2, Sentence("a bc"))
    assert (type(made), made, made.text) == (Sentence, ["aa", "bcbc"], "a bc")
    assert map_leaves(lambda leaf: -leaf, Box(1, 2)) == (-1, -2)
    assert map_leaves(lambda leaf: -leaf, labelled()).label == 7


def test_copied_containers_share_their_arrays():
    array = np.zeros(3)
    data = {"x": [array, Sample(1, 2)]}
    copied = copy_containers(data)
    copied["x"].append(1)
    assert data["x"] == [array, Sample(1, 2)]
    assert copied["x"][0] is array
