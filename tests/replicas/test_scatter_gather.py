"""Cutting batches and joining outputs: DataParallel's rules, without two of its mistakes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from accelerators import places
from torch.nn.utils.rnn import pack_sequence

from pipegraph.device import split
from pipegraph.device.split import chunk_sizes_for, cut, rows_of
from pipegraph.errors import PipegraphWarning
from pipegraph.replicas import Whole, gather, register_scatter, scatter

pytestmark = pytest.mark.usefixtures("place")


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_a_tensor_is_cut_as_torch_chunk_does(rows: int, parts: int) -> None:
    x = torch.arange(rows * 2.0).reshape(rows, 2)
    expected = x.chunk(parts)
    got = scatter(x, places(parts))
    assert [len(part) for part in expected] == chunk_sizes_for(rows, parts)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, got, strict=True))


def test_another_dimension_and_given_sizes() -> None:
    x = torch.arange(12.0).reshape(2, 6)
    assert [tuple(part.shape) for part in scatter(x, places(2), dim=1, chunk_sizes=[1, 5])] == [
        (2, 1),
        (2, 5),
    ]
    with pytest.raises(ValueError, match=r"\[1, 4\] must be at most 2 sizes >= 0 that sum to 6"):
        scatter(x, places(2), dim=1, chunk_sizes=[1, 4])


def test_containers_are_followed_and_everything_else_goes_whole() -> None:
    x = torch.arange(4)
    inputs = {
        "pair": Pair(x, "text"),
        "list": [x, 5],
        "record": Record(x, "r"),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=x),
        "captions": ["a", "b", "c", "d"],
        "nothing": None,
        "empty": (),
    }
    first, second = scatter(inputs, places(2))
    for part, expected in ((first, x[:2]), (second, x[2:])):
        assert torch.equal(part["pair"].x, expected)
        assert part["pair"].y == "text"
        assert torch.equal(part["list"][0], expected)
        assert part["list"][1] == 5
        assert torch.equal(part["record"].x, expected)
        assert part["record"].name == "r"
        assert torch.equal(part["ordered"]["a"], expected)
        assert isinstance(part["ordered"], OrderedDict)
        assert part["default"].default_factory is list
        assert torch.equal(part["default"]["a"], expected)
        assert part["captions"] == ["a", "b", "c", "d"]
        assert part["nothing"] is None
        assert part["empty"] == ()
    assert torch.equal(inputs["record"].x, x)  # type: ignore[attr-defined]


def test_zero_dim_tensors_and_whole_go_uncut_to_every_part() -> None:
    x, weights = torch.arange(4.0), torch.arange(10.0)
    parts = scatter((x, torch.tensor(3.0), Whole({"w": weights})), places(2))
    for part in parts:
        assert part[1].item() == 3.0
        assert torch.equal(part[2]["w"], weights)


def test_nothing_with_rows_gives_every_device_all() -> None:
    assert scatter({"a": 1}, places(3)) == [{"a": 1}] * 3


def test_packed_sequences_are_refused_by_name_unless_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("cpu"):
        packed = pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    with pytest.raises(TypeError, match="a PackedSequence is not split or joined by rows"):
        scatter({"x": packed}, places(2))
    with pytest.raises(TypeError, match="a PackedSequence is not split or joined by rows"):
        gather([packed, packed], places(1)[0])
    assert torch.equal(gather([packed], "cpu").data, packed.data)
    monkeypatch.setitem(
        split._rules,
        type(packed),
        split.CutRule(lambda x, dim: 2, lambda x, sizes, dim: [x] * len(sizes), lambda x, d: x),
    )
    assert [part is packed for part in scatter(packed, ["cpu", "cpu"])] == [True, True]
    monkeypatch.undo()
    for part in scatter([torch.ones(2, device="cpu"), Whole(packed)], ["cpu", "cpu"]):
        assert torch.equal(part[1].data, packed.data)


def test_unequal_rows_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match=r"inputs\[0\]\['x'\] has 4 and inputs\[1\] has 3"):
        scatter(({"x": torch.zeros(4)}, torch.zeros(3)), places(2))


def test_lists_of_the_batchs_row_count_are_cut_where_asked() -> None:
    batch = {"x": torch.zeros(3, 2), "key": ["a", "b", "c"], "two": ["s", "t"], "t": (1, 2, 3)}
    parts = cut(batch, [2, 1], lists=True)
    assert [part["key"] for part in parts] == [["a", "b"], ["c"]]
    assert all(part["two"] == ["s", "t"] and part["t"] == (1, 2, 3) for part in parts)


def test_rows_are_those_of_the_first_tensor_found() -> None:
    assert rows_of({"name": "x", "scalar": torch.tensor(1), "x": torch.zeros(5, 3)}) == 5
    assert rows_of({"x": torch.zeros(5, 3)}, dim=1) == 3
    assert rows_of(["no", "tensors"]) is None


def test_parts_have_version_counters_of_their_own() -> None:
    x = torch.ones(4)
    first, second = scatter(x, places(2))
    weight = torch.ones(2, requires_grad=True)
    product = (second * weight).sum()
    first.add_(1)  # would break the backward of the other part
    product.backward()
    assert torch.equal(torch.ones(2), weight.grad)


def test_the_backward_of_scatter_gathers_and_the_other_way_round() -> None:
    x = torch.randn(5, 3, dtype=torch.double, requires_grad=True)

    def through(x: torch.Tensor) -> torch.Tensor:
        parts = scatter(x, places(3))
        return gather([part * (i + 1) for i, part in enumerate(parts)], "cpu")

    assert torch.autograd.gradcheck(through, x)
    assert torch.autograd.gradgradcheck(lambda x: through(x) ** 2, x)


def test_gather_follows_containers_and_keeps_none() -> None:
    outputs = [{"p": Pair(torch.full((n, 2), float(n)), None), "l": [torch.zeros(n)]} for n in (2, 1)]
    joined = gather(outputs, "cpu")
    assert tuple(joined["p"].x.shape) == (3, 2)
    assert joined["p"].y is None
    assert tuple(joined["l"][0].shape) == (3,)


def test_losses_become_a_vector_with_a_warning() -> None:
    with pytest.warns(PipegraphWarning, match="0-dim"):
        joined = gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu")
    assert joined.tolist() == [1.0, 2.0]


def test_unequal_dicts_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"same keys, got \[\['a'\], \['a', 'b'\]\]"):
        gather([{"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}], "cpu")
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        gather([[torch.zeros(1)], [torch.zeros(1)] * 2], "cpu")
    with pytest.raises(TypeError, match="str"):
        gather(["a", "b"], "cpu")
    with pytest.raises(ValueError, match="no outputs"):
        gather([], "cpu")


def test_channels_last_is_kept_when_all_have_it() -> None:
    image = torch.randn(2, 3, 4, 4)
    last = image.to(memory_format=torch.channels_last)
    assert gather([last, last], "cpu").is_contiguous(memory_format=torch.channels_last)
    assert not gather([last, image], "cpu").is_contiguous(memory_format=torch.channels_last)


class Ragged:
    """A type of the user's own: rows of unequal lengths."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows


def test_own_types_register_how_they_are_cut() -> None:
    def cut_ragged(value: Ragged, sizes: Any, dim: int) -> list[Ragged]:
        parts = iter(value.rows)
        return [Ragged([next(parts) for _ in range(size)]) for size in sizes]

    register_scatter(
        Ragged,
        rows=lambda value, dim: len(value.rows),
        cut=cut_ragged,
        move=lambda value, device: Ragged([row.to(device) for row in value.rows]),
    )
    ragged = Ragged([torch.zeros(n) for n in (3, 1, 2)])
    first, second = scatter({"r": ragged, "x": torch.zeros(3)}, places(2))
    assert [len(row) for row in first["r"].rows] == [3, 1]
    assert [len(row) for row in second["r"].rows] == [2]
    with pytest.raises(ValueError, match=r"inputs\[0\] has 3 and inputs\[1\] has 2"):
        scatter((ragged, torch.zeros(2)), places(2))


@pytest.mark.parametrize("others", [None, {"a": torch.zeros(1)}, [torch.zeros(1)], 3])
def test_replicas_that_return_different_kinds_are_named(others: Any) -> None:
    kind = type(others).__name__
    with pytest.raises(TypeError, match=f"same kind of output, got Tensor, {kind}"):
        gather([torch.zeros(1), others], "cpu")
    with pytest.raises(TypeError, match=f"same kind of output, got {kind}, Tensor"):
        gather([{"x": others}, {"x": torch.zeros(1)}], "cpu")
