"""Devices unlike the one that the other tests run on: they offer less, and all is right on them.

They are not told of: what they lack is found out by asking, as of a device that nobody here has seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import simulated_device
import torch
from simulated_device import races as races_of_streams

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.device import accelerator as module
from pipegraph.errors import PipegraphWarning
from tests.device import test_every_wait as copies
from tests.loader import test_accelerator_loaders as loaders
from tests.replicas import test_every_wait as replicas

pytestmark = pytest.mark.accelerator
DEVICES: dict[str, dict[str, Any]] = {
    "one stream": {"streams": False},
    "no events": {"events": False},
    "nothing pinned": {"pinned": False},
    "memory of the host": {"streams": False, "pinned": False, "missing": {"aten::set_"}},
}
STEPS, COUNT = (0, 2, 3), 8
"""Fewer than on the device that the other tests run on."""
ALL = "PIPEGRAPH_DEVICE_SCHEDULES" in os.environ
COPIES = copies.PROGRAMS if ALL else [copies.copied, copies.scattered, copies.objects]
REPLICAS = replicas.PROGRAMS if ALL else [replicas.trained, replicas.adapted, replicas.own_backwards]


@pytest.fixture(params=DEVICES, ids=lambda name: name.replace(" ", "-"))
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Such a device; the test must have no race on it."""
    if (reason := simulated_device.why_not()) is not None:
        pytest.skip(reason)
    offered = DEVICES[request.param]
    monkeypatch.setattr(copies, "COUNT", COUNT)
    monkeypatch.setattr(replicas, "STEPS", STEPS)
    module._probed.cache_clear()
    try:
        with simulated_device.in_use(**offered) as device, races_of_streams.watched() as watch:
            yield device
            watch.check()
    finally:
        module._probed.cache_clear()


@pytest.mark.parametrize("program", COPIES)
def test_copies(other: torch.device, program: Callable[[], int]) -> None:
    assert program() == 0


@pytest.mark.parametrize("program", REPLICAS)
def test_replicas(other: torch.device, program: Callable[[], None]) -> None:
    program()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_with_pinned_batches(other: torch.device, workers: int) -> None:
    loader = pg.DataLoader(
        loaders.Numbers(), loaders.ROWS, pin_memory=True, num_workers=workers, workers="thread"
    )
    unpinned = module.unpinned()
    with pytest.warns(PipegraphWarning, match="pin_memory=True: ") if unpinned else nullcontext():
        assert loaders.sums(loader, other) == loaders.EXPECTED


def test_a_graph_that_ends_in_pin(other: torch.device) -> None:
    with loaders.batches().then(ops.Pin()).graph.loader() as loader:
        assert loaders.sums(loader, other) == loaders.EXPECTED


def test_a_loader_is_resumed(other: torch.device) -> None:
    node = loaders.batches().then(ops.Pin()).then(ops.CopyToDevice("accelerator"))
    with node.graph.loader() as loader:
        first = loaders.sums(loader, other, at_most=13)
        state = loader.state_dict()
    with node.graph.loader() as loader:
        loader.load_state_dict(state)
        assert first + loaders.sums(loader, other) == loaders.EXPECTED
