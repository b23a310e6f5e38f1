"""What counts as a container, what mapping over one keeps, and in which order its leaves come."""

import time
from collections import UserDict
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest

from pipegraph.tree import copy_containers, leaves, map_leaves


@dataclass(frozen=True)
class Sample:
    image: int
    label: int

    def __post_init__(self):
        assert self.image < 10, "checks of samples do not run on what is made of them"


class Rows(list):
    pass


@pytest.mark.parametrize(
    "data",
    [
        {"b": 1, "a": 2},
        (1, 2),
        Sample(1, 2),
        UserDict(b=1, a=2),
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


def test_copied_containers_share_their_arrays():
    array = np.zeros(3)
    data = {"x": [array, Sample(1, 2)]}
    copied = copy_containers(data)
    copied["x"].append(1)
    assert data["x"] == [array, Sample(1, 2)]
    assert copied["x"][0] is array
