"""The fixture of tests that need an accelerator: a real one where the machine has one, else the simulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simulated_device
import torch


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The first accelerator. On the simulated device work runs as late as it may, unless the test chooses a schedule."""
    real = torch.accelerator.current_accelerator(check_available=True)
    if real is not None and real.type != simulated_device.NAME:
        yield torch.device(real.type, 0)
        return
    if (reason := simulated_device.why_not()) is not None:
        pytest.skip(reason)
    with simulated_device.in_use() as device:
        yield device


@pytest.fixture
def simulated() -> Iterator[torch.device]:
    """The simulated device, for tests of what only it can show."""
    if (reason := simulated_device.why_not()) is not None:
        pytest.skip(reason)
    with simulated_device.in_use() as device:
        yield device
