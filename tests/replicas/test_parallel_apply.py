"""Modules called at the same time, under the caller's state."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from accelerators import places
from torch import nn

from pipegraph.replicas import parallel_apply

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")

pytestmark = pytest.mark.usefixtures("place")


def test_outputs_come_in_order_from_threads_of_their_own() -> None:
    names: list[str] = []

    def work(x: int, *, scale: int = 1) -> int:
        names.append(threading.current_thread().name)
        return x * scale

    assert parallel_apply([work, work], [(1,), 2], [{"scale": 10}, {}], places(2)) == [10, 2]
    own = ["pipegraph-replica-0", "pipegraph-replica-1"]
    here = [threading.current_thread().name] * 2  # where one accelerator is given work in turn
    assert sorted(names) == (own if torch.get_default_device().type == "cpu" else here)


def kind() -> str:
    here = torch.get_default_device().type
    return "cpu" if here == "meta" else here


def seen_state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind()),
        torch.get_autocast_dtype(kind()) if torch.is_autocast_enabled(kind()) else None,
        torch.is_autocast_cache_enabled(),
        torch.empty(0).device,
        colour.get(),
    )


def states() -> list[tuple[object, ...]]:
    return parallel_apply([seen_state, seen_state], [(), ()], devices=places(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_threads_see_the_callers_autocast_with_its_dtype_and_cache(dtype: torch.dtype, cache: bool) -> None:
    with torch.autocast(torch.get_default_device().type, dtype=dtype, cache_enabled=cache):
        assert states() == [seen_state()] * 2
        products = parallel_apply([nn.Linear(4, 4)] * 2, [torch.randn(2, 4)] * 2, devices=places(2))
        assert {product.dtype for product in products} == {dtype}
    with torch.autocast(kind()), torch.autocast(kind(), enabled=False):
        assert states() == [seen_state()] * 2


def test_the_first_failing_replica_is_raised_with_its_own_type_and_place() -> None:
    def fail(code: int) -> None:
        raise KeyError(f"code {code}")

    with pytest.raises(KeyError, match="code 1") as caught:
        parallel_apply([len, fail, fail], [("",), (1,), (2,)], devices=places(3))
    assert caught.value.__notes__ == [f"in replica 1 on {places(3)[1]}"]
    assert "fail" in [entry.name for entry in caught.traceback]
