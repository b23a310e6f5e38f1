"""Values of all kinds come through every backend as they are: their type, contents, strides of memory."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import typing

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|matrix subclass|beta state)")

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: typing.Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Marked(np.ndarray):
    def __array_finalize__(self, given):
        self.mark = getattr(given, "mark", None)

    def __reduce__(self):
        return marked, (int(self[0]),)


class Tagged(torch.Tensor):
    pass


def marked(number):
    made = np.arange(number, number + 3).view(Marked)
    made.mark = number
    return made


def mapped(path, mode, number):
    return np.memmap(path, np.int64, mode=mode)[number : number + 4]


VALUES = {
    "int": lambda i, _: i,
    "float": lambda i, _: i + 0.5,
    "nan": lambda i, _: [float("nan"), float("inf"), -0.0, i],
    "bool": lambda i, _: bool(i % 2),
    "none": lambda i, _: None,
    "text": lambda i, _: f"text {i} é \ud800",
    "bytes": lambda i, _: bytes([i, 0, 255]),
    "set": lambda i, _: {i, (i, i), "x"},
    "frozenset": lambda i, _: frozenset({i, "x"}),
    "default": lambda i, _: collections.defaultdict(list, {i: [i]}),
    "namedtuple": lambda i, _: Pair(i, [np.arange(i)]),
    "frozen": lambda i, _: Frozen(i, {"x": [torch.arange(i + 1)]}),
    "enum": lambda i, _: Colour(1 + i % 2),
    "date": lambda i, _: datetime.datetime(2026, 1, 1 + i, tzinfo=datetime.UTC),
    "empty": lambda i, _: [[], {}, (), "", np.empty(0), torch.empty(0, 3)],
    "scalar of numpy": lambda i, _: [
        np.float16(i),
        np.int8(i),
        np.bool_(i % 2),
        np.str_("s"),
        np.bytes_(b"b"),
    ],
    "no dimension": lambda i, _: np.array(i),
    "big endian": lambda i, _: np.arange(i, i + 4, dtype=">i4"),
    "objects": lambda i, _: np.array([i, None, "x", [1]], dtype=object),
    "fortran": lambda i, _: np.asfortranarray(np.arange(i, i + 6).reshape(2, 3)),
    "backwards": lambda i, _: np.arange(i, i + 6)[::-2],
    "map": lambda i, path: mapped(path, "r", i),
    "bfloat16": lambda i, _: torch.arange(i, i + 4).bfloat16(),
    "conjugate": lambda i, _: torch.tensor([1 + 2j, i]).conj(),
    "expanded": lambda i, _: torch.tensor([i]).expand(4),
    "transposed": lambda i, _: torch.arange(6).view(2, 3).t(),
    "channels last": lambda i, _: torch.rand(1, 3, 2, 2).to(memory_format=torch.channels_last),
    "parameter": lambda i, _: torch.nn.Parameter(torch.ones(2) * i),
    "with gradient": lambda i, _: torch.full((2,), float(i), requires_grad=True),
    "own tensor": lambda i, _: torch.arange(i, i + 3).as_subclass(Tagged),
    "coo": lambda i, _: torch.tensor([[0, i], [2, 0]]).to_sparse(),
    "dtype": lambda i, _: [torch.float32, np.dtype("i4"), torch.device("cpu")],
}


def facts(value):
    """What two equal values have in common, as something that can be compared."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        layout = (value.layout, value.dtype, tuple(value.shape), value.requires_grad)
        if value.layout in (torch.sparse_coo,):
            return kind, layout, value.detach().to_dense().tolist()
        plain = value.detach()
        strides = torch.empty_like(plain).stride()  # those of memory without gaps
        return (
            kind,
            layout,
            strides,
            [str(each) for each in plain.resolve_conj().resolve_neg().flatten().tolist()],
        )
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.shape, str(np.ndarray.tolist(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, [facts(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, dict):
        return (
            kind,
            [(key, facts(each)) for key, each in value.items()],
            getattr(value, "default_factory", None),
        )
    if isinstance(value, list | tuple):
        return kind, [facts(each) for each in value]
    return kind, value if isinstance(value, set | frozenset) else repr(value)


class Given:
    """A dataset of values of these kinds, four of each."""

    def __init__(self, path, *names):
        self.path, self.names = path, names

    def __len__(self):
        return 4 * len(self.names)

    def __getitem__(self, index):
        torch.manual_seed(index)
        return VALUES[self.names[index // 4]](index % 4, self.path)

    def made(self, index):
        return self[index]


def as_given(value):
    return value


def check(given, backend):
    """Values of a dataset, and values that a function makes, in two epochs."""
    placed = {"backend": backend}
    graph = pg.Graph("values")
    ready = graph.add(ops.FromSequence(given), name="given", **placed).then(as_given, **placed)
    made = graph.add(ops.FromSequence(range(len(given)))).then(given.made, name="made", **placed)
    graph.add(ops.Zip(), ready, made)
    with graph.loader() as loader:
        for _ in range(2):
            found = list(loader)
            assert len(found) == len(given)
            for index, pair in enumerate(found):
                for value in pair:
                    assert facts(value) == facts(given[index]), given.names[index // 4]


@pytest.fixture
def path(tmp_path):
    np.arange(20).tofile(path := tmp_path / "map")
    return path


@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("name", VALUES)
def test_values_come_through_as_they_are(name, backend, path):
    check(Given(path, name), backend)


def test_values_come_from_other_processes_as_they_are(path):
    check(Given(path, *VALUES), "process")
