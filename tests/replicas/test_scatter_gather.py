"""Cutting batches and joining outputs: DataParallel's rules, without two of its mistakes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from accelerators import places

import pipegraph as pg
from pipegraph.device.split import chunk_sizes_for
from pipegraph.replicas import Whole, gather, scatter

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


def test_a_whole_tensor_that_one_part_changes_in_place_is_unchanged_to_the_backward_of_another() -> None:
    first, second = scatter(Whole(torch.ones(3)), places(1) * 2)
    x = torch.ones(3, requires_grad=True)
    product = x * first
    second.add_(0)
    product.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, first)


def test_unequal_rows_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match=r"inputs\[0\]\['x'\] has 4 and inputs\[1\] has 3"):
        scatter(({"x": torch.zeros(4)}, torch.zeros(3)), places(2))


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


def test_a_slice_of_scattered_batches_waits_for_its_own_events() -> None:
    waited = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    whole = pg.Scattered([1, 2, 3], ["cpu"] * 3, [Event(number) for number in range(3)])  # type: ignore[arg-type]
    whole[1:].wait(0)
    assert waited == [1]
