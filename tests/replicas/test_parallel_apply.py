"""Modules called at the same time, under the caller's state."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from accelerators import on_the_cpu, places
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipegraph.errors import DeviceError, ReplicaError
from pipegraph.replicas import parallel_apply, replica_threads

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


def test_replicas_really_run_at_the_same_time() -> None:
    device = torch.get_default_device().type
    if device != "cpu" and torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices: those of one take turns")
    barrier = threading.Barrier(2)
    devices = ["cpu", "cpu"] if device == "cpu" else [f"{device}:0", f"{device}:1"]
    assert sorted(parallel_apply([barrier.wait, barrier.wait], [(), ()], devices=devices)) == [0, 1]


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


def test_threads_see_the_callers_grad_and_inference_mode() -> None:
    with torch.no_grad():
        assert states() == [seen_state()] * 2
    with torch.inference_mode():
        assert states() == [seen_state()] * 2
    assert states() == [seen_state()] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_threads_see_the_callers_autocast_with_its_dtype_and_cache(dtype: torch.dtype, cache: bool) -> None:
    with torch.autocast(torch.get_default_device().type, dtype=dtype, cache_enabled=cache):
        assert states() == [seen_state()] * 2
        products = parallel_apply([nn.Linear(4, 4)] * 2, [torch.randn(2, 4)] * 2, devices=places(2))
        assert {product.dtype for product in products} == {dtype}
    with torch.autocast(kind()), torch.autocast(kind(), enabled=False):
        assert states() == [seen_state()] * 2


def test_threads_see_the_callers_default_device_and_context_variables() -> None:
    token = colour.set("blue")
    try:
        here = places(2)
        with torch.device("meta"):
            assert parallel_apply([seen_state] * 2, [(), ()], devices=here) == [seen_state()] * 2
        assert states()[0][-1] == "blue"
    finally:
        colour.reset(token)


@on_the_cpu
def test_modes_that_threads_would_not_see_are_refused() -> None:
    class Watching(TorchDispatchMode):
        pass

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Watching(), pytest.raises(ReplicaError, match="mode"):
        states()
    with Counting(), pytest.raises(ReplicaError, match="Counting"):
        states()
    with torch.autograd.graph.save_on_cpu(), pytest.raises(ReplicaError, match="saved-tensor hooks"):
        states()


def test_the_first_failing_replica_is_raised_with_its_own_type_and_place() -> None:
    def fail(code: int) -> None:
        raise KeyError(f"code {code}")

    with pytest.raises(KeyError, match="code 1") as caught:
        parallel_apply([len, fail, fail], [("",), (1,), (2,)], devices=places(3))
    assert caught.value.__notes__ == [f"in replica 1 on {places(3)[1]}"]
    assert "fail" in [entry.name for entry in caught.traceback]


def test_one_module_runs_in_the_calling_thread() -> None:
    assert parallel_apply([threading.current_thread], [()]) == [threading.current_thread()]


def test_a_device_that_is_not_there_is_refused() -> None:
    for count in (1, 2):
        with pytest.raises(DeviceError, match="'meta:0' is not on this machine"):
            parallel_apply([len] * count, [("",)] * count, devices=["meta"] * count)


@on_the_cpu
def test_a_thread_that_cannot_have_its_device_fails_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(replica_threads, "bind_thread", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        parallel_apply([len, len], [("",), ("",)], devices=places(2))


def test_what_had_not_begun_when_ctrl_c_came_twice_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = [], threading.Event()

    def interrupted(done: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replica_threads, "lines_of", lambda devices: [0] * len(devices))
    monkeypatch.setattr(replica_threads, "wait", interrupted)
    threads = replica_threads.ReplicaThreads(["first", "second"], 1, [torch.device("cpu")] * 2)
    with pytest.raises(replica_threads.Abandoned):
        threads.run({0: gate.wait, 1: lambda: begun.append(1)})
    gate.set()
    threads.close()
    assert not begun


def test_unequal_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 modules need as many inputs"):
        parallel_apply([len, len], [("",)])


@on_the_cpu
def test_a_new_thread_takes_its_share_of_the_cores() -> None:
    torch.set_num_threads(4)
    assert parallel_apply([torch.get_num_threads] * 2, [(), ()], devices=places(2)) == [2, 2]
