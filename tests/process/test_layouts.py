"""Tensors and arrays come out of other processes in the memory layout that they went in with."""

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


def images(n, channels):
    return torch.arange(n * channels * 4 * 5.0).view(n, channels, 4, 5)


def channels_last(n=2, channels=3):
    return images(n, channels).to(memory_format=torch.channels_last)


LAYOUTS = {
    "channels last": channels_last(),
    "channels last, large": channels_last(64),
    "channels last of one channel": channels_last(2, 1),
    "channels last of one image": channels_last(1),
    "channels last, 3d": images(2, 3).view(2, 3, 4, 5, 1).to(memory_format=torch.channels_last_3d),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "transposed, large": torch.arange(6000.0).view(20, 300).t(),
    "permuted": images(2, 3).permute(2, 0, 3, 1),
    "permuted with a gradient": images(2, 3).permute(2, 0, 3, 1).requires_grad_(),
    "conjugate": torch.tensor([[1 + 2j, 3.0], [4.0, 5j], [6.0, 7.0]]).t().conj(),
    "bfloat16": channels_last().to(torch.bfloat16),
    "part of a storage": images(4, 3)[1:3].transpose(1, 2),
}
OTHERS = {
    "sliced": channels_last()[:, :, 1:3, 1:3],
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "every other": torch.arange(12.0).view(3, 4)[:, ::2],
    "empty": torch.zeros(0, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.0),
    "overlapping": torch.arange(9.0).as_strided((3, 3), (1, 2)),
}
FORTRAN = {
    "small": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "large": np.zeros((40, 50, 3), order="F"),
}


def stride_of(value):
    return value.stride() if isinstance(value, torch.Tensor) else value.strides


def crossed(value, place):
    """The value behind a worker process, and its strides there."""
    graph = pg.Graph("layouts")
    if place == "closed over":
        graph.add(ops.FromSequence([0])).then(lambda _: (value, stride_of(value)), backend="process")
    else:
        graph.add(ops.FromSequence([{"x": value}])).then(
            lambda sample: (sample["x"], stride_of(sample["x"])),
            backend="process",
        )
    with graph.loader() as loader:
        (found,) = loader
    return found


@pytest.mark.parametrize("value", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("place", ["sent", "closed over"])
def test_a_dense_tensor_keeps_its_strides(value, place):
    found, there = crossed(value, place)
    assert there == found.stride() == value.stride()
    assert found.shape == value.shape and found.dtype == value.dtype
    assert found.requires_grad == value.requires_grad
    assert torch.equal(found, value)


@pytest.mark.parametrize("value", FORTRAN.values(), ids=FORTRAN)
@pytest.mark.parametrize("place", ["sent", "closed over"])
def test_an_array_keeps_its_strides(value, place):
    found, there = crossed(value, place)
    assert there == found.strides == value.strides
    assert np.array_equal(found, value)


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_what_has_gaps_or_repeats_keeps_its_values(value):
    found, _ = crossed(value, "sent")
    assert found.shape == value.shape
    assert torch.equal(found, value)
