"""Coalesced copies and sums, and functional replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import places
from torch import nn

from pipegraph.replicas import broadcast_coalesced, reduce_add_coalesced, replicate

pytestmark = pytest.mark.usefixtures("place")


def mixed_tensors() -> list[torch.Tensor]:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True
    ).coalesce()
    return [
        torch.randn(3, 4),
        torch.arange(5),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        sparse,
        torch.randn(4, 3).t(),
        torch.randn(2, dtype=torch.complex64),
        torch.zeros(0),
        torch.tensor(3.0, dtype=torch.float64),
        torch.randn(6),
    ]


@pytest.mark.parametrize("buffer_size", [1, 40, 10 * 1024 * 1024])
def test_broadcast_keeps_order_types_and_strides(buffer_size: int) -> None:
    tensors = mixed_tensors()
    first, *others = broadcast_coalesced(tensors, places(2) * 2, buffer_size)
    assert all(a is b for a, b in zip(first, tensors, strict=True))
    for copies in others:
        for copy, tensor in zip(copies, tensors, strict=True):
            assert copy.dtype == tensor.dtype
            if tensor.is_sparse:
                assert copy.is_coalesced()
                assert torch.equal(copy.to_dense().cpu(), tensor.to_dense().cpu())
            else:
                assert torch.equal(copy.cpu(), tensor.cpu())
                assert copy.stride() == tensor.stride()
                assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("buffer_size", [1, 40, 10 * 1024 * 1024])
def test_reduce_sums_in_the_replicas_order(buffer_size: int) -> None:
    inputs = [mixed_tensors() for _ in range(3)]
    for total, *given in zip(
        reduce_add_coalesced(inputs, torch.get_default_device(), buffer_size), *inputs, strict=True
    ):
        expected = given[0] + given[1] + given[2]
        assert (
            torch.equal(total.to_dense(), expected.to_dense())
            if total.is_sparse
            else torch.equal(total, expected)
        )


class Tied(nn.Module):
    """Shared parameters, a shared submodule, plain and trainable buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, dtype=torch.double)
        self.b = nn.Linear(3, 3, dtype=torch.double)
        self.b.weight = self.a.weight
        self.again = self.a
        self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.double))
        self.register_buffer("bias", torch.zeros(3, dtype=torch.double, requires_grad=True))
        self.norm = nn.BatchNorm1d(3, dtype=torch.double)
        self.rnn = nn.RNN(3, 3, batch_first=True, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.again(self.b(self.a(x))) * self.scale + self.bias)
        return self.rnn(y.unsqueeze(1))[0].squeeze(1)


def test_statistics_of_the_first_replica_persist() -> None:
    model = Tied().train()
    before = model.norm.running_mean.clone()
    replicate(model, places(3))[0](torch.randn(4, 3, dtype=torch.double))
    assert not torch.equal(before, model.norm.running_mean)
