"""The simulated device keeps the rules of a real one: what the tests of everything above rely on."""

from __future__ import annotations

import threading

import pytest
import simulated_device
import torch
from simulated_device import build
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


def test_convolutions_norms_dropout_and_attention_run() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).to(FIRST)
    rows = torch.randn(2, 3, 8, 8, device=FIRST, requires_grad=True)
    layers(rows).square().sum().backward()
    assert rows.grad is not None and rows.grad.isfinite().all()
    query = torch.randn(2, 4, 8, 8, device=FIRST)
    expected = nn.functional.scaled_dot_product_attention(*[query.cpu()] * 3)
    torch.testing.assert_close(
        nn.functional.scaled_dot_product_attention(query, query, query).cpu(), expected
    )


def test_an_operator_that_the_cpu_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(
        NotImplementedError, match="_thnn_fused_lstm_cell has no kernel on a simulated device"
    ):
        nn.LSTM(4, 4).to(FIRST)(torch.ones(2, 1, 4, device=FIRST))


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


def test_random_schedules_run_some_work_early_and_are_drawn_from_the_seed() -> None:
    native = simulated_device.native()

    def left(seed: int) -> list[int]:
        native.finish_all_work()
        native.schedule("random", seed)
        counts = []
        for _ in range(30):
            torch.ones(4, device=FIRST)
            counts.append(native.pending())
        return counts

    assert left(1) == left(1) != left(2)


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


def test_pinned_memory_is_used_again_when_the_copies_that_read_it_are_done() -> None:
    host = torch.ones(1000, pin_memory=True)
    place = host.data_ptr()
    there = host.to(FIRST, non_blocking=True)
    del host
    assert torch.empty(1000, pin_memory=True).data_ptr() != place
    assert there.sum() == 1000
    assert place in [each.data_ptr() for each in [torch.empty(1000, pin_memory=True) for _ in range(3)]]


def test_freed_memory_is_poisoned_and_used_again_by_its_stream() -> None:
    first = torch.ones(1000, device=FIRST)
    place = first.data_ptr()
    del first
    again = torch.empty(1000, device=FIRST)
    assert again.data_ptr() == place
    assert again.isnan().all()
    with torch.Stream(FIRST):
        assert torch.empty(1000, device=FIRST).data_ptr() != place


@pytest.mark.parametrize("recorded", [True, False])
def test_record_stream_keeps_memory_until_the_reader_is_done(recorded: bool) -> None:
    memory = torch.ones(1000, device=FIRST)
    place = memory.data_ptr()
    torch.accelerator.synchronize()
    reader = torch.Stream(FIRST)
    with reader:
        total = memory.sum()
    if recorded:
        memory.record_stream(reader)
    del memory
    again = torch.empty(1000, device=FIRST)
    assert (again.data_ptr() != place) is recorded
    torch.accelerator.current_stream().synchronize()
    with reader:
        assert bool(total.isnan()) is not recorded
        assert not recorded or torch.empty(1000, device=FIRST).data_ptr() != place
    torch.accelerator.synchronize()
    assert (torch.empty(1000, device=FIRST).data_ptr() == place) is recorded


def test_each_thread_has_its_own_current_device_and_stream() -> None:
    seen = []

    def look() -> None:
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(FIRST)))

    with torch.Stream(SECOND), torch.Stream(FIRST) as mine:
        assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_stream(FIRST) == mine
        torch.accelerator.set_device_index(1)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        torch.accelerator.set_device_index(0)
    assert seen == [(0, torch.accelerator.current_stream(FIRST))]


def test_operands_on_two_devices_are_refused() -> None:
    for other in (SECOND, "cpu"):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(3, device=FIRST) + torch.ones(3, device=other)
    with pytest.raises(RuntimeError, match="there is no device 7 among 4"):
        torch.ones(3, device="simulated:7")


def test_copies_between_devices_are_ordered_on_both() -> None:
    source = torch.arange(4.0, device=FIRST)
    there = source.to(SECOND, non_blocking=True)
    source.fill_(-1)
    assert there.tolist() == [0, 1, 2, 3]


def test_a_kernel_that_fails_is_raised_by_the_next_wait() -> None:
    nn.Embedding(4, 2).to(FIRST)(torch.tensor([9], device=FIRST))
    with pytest.raises(IndexError, match="index out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_random_numbers_are_the_devices_own() -> None:
    module = torch.get_device_module(FIRST)
    module.default_generators[1].manual_seed(5)
    before = torch.get_rng_state()
    ours = [torch.rand(3, device=SECOND), nn.functional.dropout(torch.ones(99, device=SECOND))]
    module.default_generators[1].manual_seed(5)
    again = [torch.rand(3, device=SECOND), nn.functional.dropout(torch.ones(99, device=SECOND))]
    assert all(torch.equal(x, y) for x, y in zip(ours, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_cpu_is_refused_as_cuda_refuses_it() -> None:
    own = torch.Generator(FIRST).manual_seed(1)
    drawn = torch.rand(3, generator=own, device=FIRST)
    assert torch.equal(drawn, torch.rand(3, generator=own.manual_seed(1), device=FIRST))
    for draw in (torch.rand, torch.randperm):
        with pytest.raises(RuntimeError, match="Expected a 'simulated' device type for generator"):
            draw(3, generator=torch.Generator(), device=FIRST)


def test_memory_of_no_bytes_is_not_pinned() -> None:
    assert torch.ones(2, 3).pin_memory().is_pinned()
    assert not torch.ones(2, 0).pin_memory().is_pinned()


def test_memory_is_counted() -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    rows = torch.empty(1 << 20, device=FIRST)
    del rows
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + (4 << 20)


def test_it_is_built_once_and_only_its_sources_build_it_anew(tmp_path, monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(build, "_compile", lambda target: compiled.append(target) or target.write_bytes(b""))
    for _ in range(2):
        with pytest.raises(ImportError):
            build.native(tmp_path)
    assert len(compiled) == 1
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(ImportError):
        build.native(tmp_path)
    assert len(compiled) == 2


def test_without_a_compiler_the_reason_is_said(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "needs a C++ compiler" in str(simulated_device.why_not())
