"""Slabs: used again and again, and never while anybody reads them."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pytest
import torch

from pipegraph.device.slabs import SlabRing, pageable

SHAPE = (4, 8)


def ring(spare: int = 8) -> SlabRing:
    return SlabRing(pageable, spare)


def delivery(slabs: SlabRing, value: int) -> torch.Tensor:
    slab = slabs.take(32)
    slab[:32] = value
    return slabs.lend(slab).tensor(torch.uint8, SHAPE)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, batch):
        ctx.save_for_backward(batch)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].float().mean(), None


def saved_by_autograd(batch: torch.Tensor) -> object:
    x = torch.ones((), requires_grad=True)
    return _Square.apply(x, batch)


HOLDINGS = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[1:3],
    "a row": lambda t: t[2],
    "a view": lambda t: t.view(-1),
    "a transpose": lambda t: t.t(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "numpy of a slice": lambda t: t[1:].numpy(),
    "numpy's view of numpy": lambda t: t.numpy()[::2].T,
    "the storage": lambda t: t.untyped_storage(),
    "a tensor over the storage": lambda t: torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()),
    "dlpack": lambda t: torch.utils.dlpack.from_dlpack(t),
    "memoryview": lambda t: memoryview(t.numpy()),
    "another dtype's view": lambda t: t.view(torch.int32),
    "a list of rows": lambda t: list(t),
    "autograd": saved_by_autograd,
}


def contents(held: object) -> set[int]:
    if isinstance(held, torch.Tensor):
        if held.grad_fn is not None:
            return contents(held.grad_fn.saved_tensors[0])
        return set(held.contiguous().view(torch.uint8).flatten().tolist())
    if isinstance(held, torch.UntypedStorage):
        return set(held.tolist())
    if isinstance(held, list):
        return set().union(*map(contents, held))
    return set(np.asarray(held).flatten().tolist())


@pytest.mark.parametrize("how", HOLDINGS, ids=lambda how: how.replace(" ", "-"))
def test_a_batch_that_is_held_in_any_way_stays_unchanged_for_1000_deliveries(how):
    slabs = ring()
    batch = delivery(slabs, 7)
    held = HOLDINGS[how](batch)
    del batch
    gc.collect()
    for step in range(1000):
        delivery(slabs, step % 100 + 10)
    assert contents(held) == {7}


def test_one_slab_serves_all_deliveries_when_none_is_held():
    counted = Counter()
    slabs = SlabRing(pageable, 8, count=lambda name, more: counted.update({name: more}))
    for step in range(1000):
        assert contents(delivery(slabs, step % 200)) == {step % 200}
    assert counted["slabs_made"] == 1
