"""Fixtures of tests that need an accelerator: a real one where the machine has one, else the simulated device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import simulated_device
import torch
from simulated_device import races as races_of_streams

from pipegraph.device import accelerator as device_accelerator


def delay(cycles: int = 20_000_000) -> None:
    """Make the current stream late on a GPU, by some clock cycles (the default: about 10 ms, more than the host takes for
    a batch); the simulated device's are as late as they may be."""
    if torch.accelerator.current_accelerator() == torch.device("cuda"):
        torch.cuda._sleep(cycles)


def new_stream(device: str) -> torch.Stream:
    """A stream of the test's own, or the one that the device has, where who reads on another must keep what it reads."""
    offered = device_accelerator.offers(torch.device(device))
    if offered.streams:
        return torch.Stream(device)
    return torch.accelerator.current_stream(device)


def in_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, where there is any."""
    return tensor.clone() if device_accelerator.unpinned() else tensor.pin_memory()


def wait_for(device: str) -> None:
    """For all that the current stream of a device was given."""
    torch.empty(1, device=device).cpu()


def here() -> str:
    """The first accelerator's name."""
    return f"{torch.accelerator.current_accelerator()}:0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The device is there before the first test: autograd counts the devices of a process at its first backward."""
    for item in items:
        if {"simulated", "accelerator"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("accelerator")
    if any(item.get_closest_marker("accelerator") for item in items) and simulated_device.why_not() is None:
        simulated_device.native()
        if (
            trace := threading.gettrace()
        ) is not None:  # the lines that autograd's own threads run are counted too
            for index in range(simulated_device.native().DEVICES):
                _in_autograds_thread(f"{simulated_device.NAME}:{index}", partial(sys.settrace, trace))


def _in_autograds_thread(device: str, work: Callable[[], object]) -> None:
    """Call ``work`` once in the thread that makes the backwards of a device."""
    with simulated_device.in_use():
        leaf = torch.ones((), device=device, requires_grad=True)
        leaf.register_hook(lambda grad: work() and None)  # type: ignore[no-untyped-call]
        (leaf * 1).backward()  # type: ignore[no-untyped-call]


@pytest.fixture
def simulated() -> Iterator[torch.device]:
    """The simulated device, for tests of what only it can show."""
    if (reason := simulated_device.why_not()) is not None:
        pytest.skip(reason)
    device_accelerator._probed.cache_clear()
    with simulated_device.in_use() as device:
        yield device
    device_accelerator._probed.cache_clear()


@pytest.fixture
def races(simulated: torch.device) -> Iterator[races_of_streams.Watch]:
    """The simulated device, watched: the test asks for the races that it expects."""
    with races_of_streams.watched() as watch:
        yield watch


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The first accelerator. The simulated device runs work as late as it may; there the test must have no race."""
    real = torch.accelerator.current_accelerator(check_available=True)
    if real is not None and real.type != simulated_device.NAME:
        yield torch.device(real.type, 0)
        return
    watch = request.getfixturevalue("races")
    yield torch.device(simulated_device.NAME, 0)
    if "missing_wait" not in request.fixturenames:
        watch.check()


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.accelerator)])
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, then the accelerator: where modules and tensors are made unless a test says otherwise."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    device: torch.device = request.getfixturevalue("accelerator")
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


on_the_cpu = pytest.mark.parametrize("place", ["cpu"], indirect=True)
"""For a test, among others with `place`, of what the CPU alone has."""

on_the_accelerator = pytest.mark.parametrize(
    "place", [pytest.param("accelerator", marks=pytest.mark.accelerator)], indirect=True
)


def places(count: int) -> list[str]:
    """That many slots at the test's place: of more than two the last is on a second accelerator, if there is one."""
    kind = torch.get_default_device().type
    if kind == "cpu":
        return ["cpu"] * count
    last = min(1, torch.accelerator.device_count() - 1) if count > 2 else 0
    return [f"{kind}:0"] * (count - 1) + [f"{kind}:{last}"]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.double) -> torch.Tensor:
    """The same random numbers at every place."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(torch.get_default_device())


@pytest.fixture
def missing_wait(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For a test that takes a wait away: its races are no failure."""
    return monkeypatch
