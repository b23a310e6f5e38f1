"""The simulated device keeps the rules of a real one: what the tests of everything above rely on."""

from __future__ import annotations

import pytest
import simulated_device
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("simulated")
FIRST, SECOND = "simulated:0", "simulated:1"


def trained(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        rows = torch.randn(32, 8, generator=generator).to(device)
        labels = torch.randint(0, 3, (32,), generator=generator).to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("schedule", ["latest", "random", "eager"])
def test_a_network_trains_as_on_the_cpu(schedule: simulated_device.Schedule) -> None:
    simulated_device.native().schedule(schedule, 3)
    for ours, theirs in zip(trained(SECOND), trained("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_work_runs_when_somebody_waits_for_it() -> None:
    native = simulated_device.native()
    total = torch.ones(4, device=FIRST) + 1
    assert native.pending() >= 2
    event = torch.Event(FIRST)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query() and native.pending() == 0
    assert total.tolist() == [2] * 4


def test_streams_are_independent_until_an_event_ties_them() -> None:
    values = torch.zeros(4, device=FIRST)
    torch.accelerator.synchronize()
    side, event = torch.Stream(FIRST), torch.Event(FIRST)
    with side:
        values.fill_(1)
        event.record(side)
    untied = values.clone()
    assert untied.tolist() == [0] * 4
    torch.accelerator.current_stream().wait_event(event)
    assert values.tolist() == [1] * 4


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_to_the_host_is_late_only_if_the_memory_is_pinned(pinned: bool) -> None:
    host = torch.zeros(4, pin_memory=pinned)
    host.copy_(torch.ones(4, device=FIRST), non_blocking=True)
    assert host.tolist() == [0.0 if pinned else 1.0] * 4
    torch.accelerator.synchronize()
    assert host.tolist() == [1] * 4


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_from_the_host_reads_pinned_memory_late(pinned: bool) -> None:
    host = torch.ones(4, pin_memory=pinned)
    assert host.is_pinned() is pinned
    there = host.to(FIRST, non_blocking=True)
    host.fill_(2)
    assert there.tolist() == [2.0 if pinned else 1.0] * 4
