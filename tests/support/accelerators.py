"""Fixtures of tests that need an accelerator: a real one where the machine has one, else the simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simulated_device
import torch
from simulated_device import races as races_of_streams


def delay(cycles: int = 2_000_000) -> None:
    """Make the current stream late on a GPU, by some clock cycles; the simulated device's are as late as they may be."""
    if torch.accelerator.current_accelerator() == torch.device("cuda"):
        torch.cuda._sleep(cycles)


def here() -> str:
    """The first accelerator's name."""
    return f"{torch.accelerator.current_accelerator()}:0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The device is there before the first test: autograd counts the devices of a process at its first backward."""
    wanted = any(
        "simulated" in getattr(item, "fixturenames", ()) or "accelerator" in getattr(item, "fixturenames", ())
        for item in items
    )
    if wanted and simulated_device.why_not() is None:
        simulated_device.native()


@pytest.fixture
def simulated() -> Iterator[torch.device]:
    """The simulated device, for tests of what only it can show."""
    if (reason := simulated_device.why_not()) is not None:
        pytest.skip(reason)
    with simulated_device.in_use() as device:
        yield device


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


@pytest.fixture
def missing_wait(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For a test that takes a wait away: its races are no failure."""
    return monkeypatch
