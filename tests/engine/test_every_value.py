"""Values of all kinds come through every backend as they are: their type, contents, strides of memory."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import typing
import uuid

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|matrix subclass|beta state)")

Pair = collections.namedtuple("Pair", "a b")


class Typed(typing.NamedTuple):
    a: int
    b: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: typing.Any


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int
    b: typing.Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Words(str):
    __slots__ = ("note",)


class Rows(list):
    pass


class Named(dict):
    pass


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
    "large int": lambda i, _: 1 << (70 + i),
    "float": lambda i, _: i + 0.5,
    "nan": lambda i, _: [float("nan"), float("inf"), -0.0, i],
    "complex": lambda i, _: complex(i, -i),
    "bool": lambda i, _: bool(i % 2),
    "none": lambda i, _: None,
    "text": lambda i, _: f"text {i} é \ud800",
    "bytes": lambda i, _: bytes([i, 0, 255]),
    "bytearray": lambda i, _: bytearray([i, 0, 255]),
    "range": lambda i, _: range(i, 10 * i, 2),
    "slice": lambda i, _: slice(i, None, 2),
    "set": lambda i, _: {i, (i, i), "x"},
    "frozenset": lambda i, _: frozenset({i, "x"}),
    "deque": lambda i, _: collections.deque([i, [i]], maxlen=5),
    "counter": lambda i, _: collections.Counter({"a": i, "b": 2}),
    "ordered": lambda i, _: collections.OrderedDict(b=i, a=[1]),
    "default": lambda i, _: collections.defaultdict(list, {i: [i]}),
    "namedtuple": lambda i, _: Pair(i, [np.arange(i)]),
    "typed": lambda i, _: Typed(i, torch.arange(3)),
    "frozen": lambda i, _: Frozen(i, {"x": [torch.arange(i + 1)]}),
    "slotted": lambda i, _: Slotted(i, np.arange(3.0)),
    "namespace": lambda i, _: types.SimpleNamespace(a=i, b=torch.ones(2)),
    "own list": lambda i, _: Rows([i, np.arange(2)]),
    "own dict": lambda i, _: Named(a=i, b=torch.ones(1)),
    "own text": lambda i, _: Words(f"w{i}"),
    "enum": lambda i, _: Colour(1 + i % 2),
    "decimal": lambda i, _: decimal.Decimal(i) / 7,
    "fraction": lambda i, _: fractions.Fraction(i, 7),
    "uuid": lambda i, _: uuid.UUID(int=i),
    "path": lambda i, _: pathlib.Path(f"a/{i}"),
    "date": lambda i, _: datetime.datetime(2026, 1, 1 + i, tzinfo=datetime.UTC),
    "class": lambda i, _: (Frozen, Colour)[i % 2],
    "mixed keys": lambda i, _: {1: i, "1": [i], (2, 3): np.arange(i + 1), None: torch.ones(1)},
    "empty": lambda i, _: [[], {}, (), "", np.empty(0), torch.empty(0, 3)],
    "scalar of numpy": lambda i, _: [
        np.float16(i),
        np.int8(i),
        np.bool_(i % 2),
        np.str_("s"),
        np.bytes_(b"b"),
    ],
    "time": lambda i, _: [np.datetime64("2026-01-01") + i, np.timedelta64(i, "ms")],
    "array of times": lambda i, _: np.array(["2026-01-01", "NaT"], "datetime64[ns]") + np.timedelta64(i),
    "no dimension": lambda i, _: np.array(i),
    "big endian": lambda i, _: np.arange(i, i + 4, dtype=">i4"),
    "big endian from a map": lambda i, path: np.memmap(path, ">i4", mode="r")[i : i + 4],
    "big endian with gaps": lambda i, _: np.arange(i, i + 8, dtype=">i4")[::2],
    "half": lambda i, _: np.arange(i, i + 4, dtype=np.float16),
    "long double": lambda i, _: np.arange(i, i + 4, dtype=np.longdouble),
    "complex array": lambda i, _: np.arange(i, i + 4) * 1j,
    "texts": lambda i, _: np.array([f"{i}", "longer"]),
    "objects": lambda i, _: np.array([i, None, "x", [1]], dtype=object),
    "structured": lambda i, _: np.array([(i, 0.5), (2, 1.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "record": lambda i, _: np.rec.array([(i, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "matrix": lambda i, _: np.asmatrix(np.arange(i, i + 4).reshape(2, 2)),
    "masked": lambda i, _: np.ma.array([i, 2, 3], mask=[False, True, False], fill_value=9),
    "own array": lambda i, _: marked(i),
    "fortran": lambda i, _: np.asfortranarray(np.arange(i, i + 6).reshape(2, 3)),
    "backwards": lambda i, _: np.arange(i, i + 6)[::-2],
    "map": lambda i, path: mapped(path, "r", i),
    "map to write": lambda i, path: mapped(path, "c", i),
    "of a map": lambda i, path: mapped(path, "r", i).astype(np.float32),
    "sum of a map": lambda i, path: mapped(path, "r", i) + 1,
    "number of a map": lambda i, path: mapped(path, "r", i)[0],
    "bfloat16": lambda i, _: torch.arange(i, i + 4).bfloat16(),
    "number of torch": lambda i, _: torch.tensor(i),
    "bools of torch": lambda i, _: torch.tensor([True, i % 2 == 0]),
    "conjugate": lambda i, _: torch.tensor([1 + 2j, i]).conj(),
    "negated": lambda i, _: torch.tensor([1 + 2j, i]).conj().imag,
    "expanded": lambda i, _: torch.tensor([i]).expand(4),
    "transposed": lambda i, _: torch.arange(6).view(2, 3).t(),
    "channels last": lambda i, _: torch.rand(1, 3, 2, 2).to(memory_format=torch.channels_last),
    "parameter": lambda i, _: torch.nn.Parameter(torch.ones(2) * i),
    "with gradient": lambda i, _: torch.full((2,), float(i), requires_grad=True),
    "own tensor": lambda i, _: torch.arange(i, i + 3).as_subclass(Tagged),
    "coo": lambda i, _: torch.tensor([[0, i], [2, 0]]).to_sparse(),
    "csr": lambda i, _: torch.tensor([[0.0, i], [2, 0]]).to_sparse_csr(),
    "quantized": lambda i, _: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8),
    "packed": lambda i, _: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2) * i]),
    "size": lambda i, _: torch.Size([i, 2]),
    "dtype": lambda i, _: [torch.float32, np.dtype("i4"), torch.device("cpu")],
}


def facts(value):
    """What two equal values have in common, as something that can be compared."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        layout = (value.layout, value.dtype, tuple(value.shape), value.requires_grad)
        if value.layout in (torch.sparse_coo, torch.sparse_csr):
            return kind, layout, value.detach().to_dense().tolist()
        plain = value.dequantize() if value.is_quantized else value.detach()
        strides = torch.empty_like(plain).stride()  # those of memory without gaps
        return (
            kind,
            layout,
            strides,
            [str(each) for each in plain.resolve_conj().resolve_neg().flatten().tolist()],
        )
    if isinstance(value, np.ma.MaskedArray):
        return kind, value.dtype.str, value.mask.tolist(), value.filled().tolist(), value.fill_value
    if isinstance(value, np.ndarray):
        mark = getattr(value, "mark", None) if isinstance(value, Marked) else None
        return kind, value.dtype, value.shape, mark, str(np.ndarray.tolist(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, [facts(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, types.SimpleNamespace):
        return kind, facts(vars(value))
    if isinstance(value, dict):
        return (
            kind,
            [(key, facts(each)) for key, each in value.items()],
            getattr(value, "default_factory", None),
        )
    if isinstance(value, list | tuple | collections.deque):
        return kind, [facts(each) for each in value], getattr(value, "maxlen", None)
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


@pytest.mark.filterwarnings("ignore:.*returned None for its first item")
@pytest.mark.parametrize("backend", ["inline", "thread"])
@pytest.mark.parametrize("name", VALUES)
def test_values_come_through_as_they_are(name, backend, path):
    check(Given(path, name), backend)


def test_values_come_from_other_processes_as_they_are(path):
    check(Given(path, *VALUES), "process")
