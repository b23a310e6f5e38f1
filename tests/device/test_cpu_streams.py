"""The CPU backend follows CUDA's rules for streams and events."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from pipegraph.device import Backend, Slot, backend_for, slots_on
from pipegraph.errors import DeviceError

CPU = torch.device("cpu")


@pytest.fixture
def backend() -> Iterator[Backend]:
    with backend_for("cpu") as made:
        yield made


def stream_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipegraph-stream")]


def test_work_of_one_stream_runs_in_the_order_given(backend: Backend) -> None:
    stream = backend.stream(Slot(CPU), "a")
    seen: list[int] = []
    for number in range(100):
        stream.run(lambda number=number: seen.append(number))
    stream.synchronize()
    assert list(range(100)) == seen


def test_giving_work_does_not_wait_for_it(backend: Backend) -> None:
    gate = threading.Event()
    stream = backend.stream(Slot(CPU), "a")
    stream.run(gate.wait)
    event = stream.record_event()
    assert not event.query()
    assert not stream.query()
    gate.set()
    event.synchronize()
    assert event.query()


def test_a_stream_waits_for_an_event_of_another_and_the_host_does_not(backend: Backend) -> None:
    gate = threading.Event()
    first, second = backend.stream(Slot(CPU), "first"), backend.stream(Slot(CPU, 1), "second")
    seen: list[str] = []
    first.run(gate.wait)
    first.run(lambda: seen.append("first"))
    second.wait_event(first.record_event())
    second.run(lambda: seen.append("second"))
    assert seen == []  # the host came here while the gate is closed
    gate.set()
    second.synchronize()
    assert seen == ["first", "second"]


def test_an_event_never_recorded_is_no_wait(backend: Backend) -> None:
    stream = backend.stream(Slot(CPU), "a")
    event = backend.event()
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    stream.synchronize()


def test_a_wait_holds_for_the_latest_record_at_the_time_of_the_call(backend: Backend) -> None:
    gate = threading.Event()
    first, second = backend.stream(Slot(CPU), "first"), backend.stream(Slot(CPU), "second")
    event = first.record_event()
    second.wait_event(event)
    first.run(gate.wait)
    first.record_event(event)
    second.synchronize()  # would hang if the second record counted
    assert not event.query()
    gate.set()
    event.synchronize()


def test_the_host_is_its_own_current_stream_unless_it_takes_another(backend: Backend) -> None:
    gate = threading.Event()
    copy, compute = backend.stream(Slot(CPU), "copy"), backend.stream(Slot(CPU), "compute")
    copy.run(gate.wait)
    copied = copy.record_event()
    with backend.use(compute):
        assert backend.current_stream() is compute
        copied.wait()  # the stream waits, the host does not
        after = backend.event()
        after.record()
    assert not after.query()
    gate.set()
    copied.wait()  # now the host is the stream
    after.synchronize()


def test_the_current_stream_is_the_threads_own(backend: Backend) -> None:
    stream = backend.stream(Slot(CPU), "a")
    seen: list[object] = []
    with backend.use(stream):
        thread = threading.Thread(target=lambda: seen.append(backend.current_stream()))
        thread.start()
        thread.join()
    assert seen[0] is not stream


def test_a_failure_surfaces_at_the_next_wait_with_its_own_type(backend: Backend) -> None:
    stream = backend.stream(Slot(CPU), "a")
    seen: list[str] = []

    def fail() -> None:
        raise KeyError("broken")

    stream.run(fail)
    stream.run(lambda: seen.append("left out"))
    broken = stream.record_event()
    stream.run(lambda: seen.append("after the record"))
    with pytest.raises(KeyError, match="broken"):
        broken.synchronize()
    stream.synchronize()  # seen once is enough
    assert seen == ["after the record"]


def test_a_failure_nobody_has_seen_is_raised_by_synchronize_once(backend: Backend) -> None:
    stream = backend.stream(Slot(CPU), "a")
    stream.run(lambda: 1 / 0)
    stream.record_event()
    stream.run(lambda: None)
    with pytest.raises(ZeroDivisionError):
        backend.synchronize()
    stream.synchronize()


def test_a_failure_travels_over_events_to_streams_that_wait(backend: Backend) -> None:
    first, second = backend.stream(Slot(CPU), "first"), backend.stream(Slot(CPU), "second")
    seen: list[str] = []
    first.run(lambda: 1 / 0)
    second.wait_event(first.record_event())
    second.run(lambda: seen.append("read what was never written"))
    with pytest.raises(ZeroDivisionError):
        second.synchronize()
    assert seen == []


def test_a_copy_is_made_on_the_stream_and_without_autograd(backend: Backend) -> None:
    stream = backend.stream(Slot(CPU), "copy")
    source = torch.randn(5, requires_grad=True)
    target = torch.zeros(5)
    backend.copy_async(target, source, stream)
    stream.synchronize()
    assert torch.equal(target, source.detach())
    assert not target.requires_grad


def test_closing_ends_every_thread_and_fails_what_had_not_begun() -> None:
    before = stream_threads()
    backend = backend_for("cpu")
    gate, entered = threading.Event(), threading.Event()
    first, second = backend.stream(Slot(CPU), "first"), backend.stream(Slot(CPU), "second")

    def hold() -> None:
        entered.set()
        gate.wait()

    first.run(hold)
    entered.wait()
    pending = first.record_event()
    second.wait_event(pending)
    second.run(lambda: None)
    dropped = second.record_event()
    closer = threading.Thread(target=backend.close)
    closer.start()
    # The second stream is freed from its wait although the first still holds.
    with pytest.raises(DeviceError, match="closed"):
        dropped.synchronize()
    gate.set()
    closer.join()
    assert before == stream_threads()
    with pytest.raises(DeviceError, match="closed"):
        pending.synchronize()
    with pytest.raises(DeviceError, match="closed"):
        first.run(lambda: None)
    with pytest.raises(DeviceError, match="closed"):
        backend.stream(Slot(CPU), "third")
    backend.close()


def test_a_stream_nobody_holds_ends_its_thread() -> None:
    backend = backend_for("cpu")
    stream = backend.stream(Slot(CPU), "collected")
    stream.run(lambda: None)
    stream.synchronize()
    (thread,) = [t for t in threading.enumerate() if t.name == "pipegraph-stream-collected"]
    del stream
    gc.collect()
    thread.join()
    backend.close()


def test_a_streams_thread_uses_one_core_and_leaves_other_threads_alone(backend: Backend) -> None:
    width = torch.get_num_threads()
    stream = backend.stream(Slot(CPU), "narrow")
    widths: list[int] = []
    stream.run(lambda: widths.append(torch.get_num_threads()))
    stream.synchronize()
    later = threading.Thread(target=lambda: widths.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert [1, width] == widths
    assert width == torch.get_num_threads()


def test_slots_are_numbered_on_their_device() -> None:
    assert [str(slot) for slot in slots_on(["cuda", "cpu", 0, "cpu", "cuda:1"])] == [
        "cuda:0#0",
        "cpu#0",
        "cuda:0#1",
        "cpu#1",
        "cuda:1#0",
    ]


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="'meta:0' is not on this machine, which has no accelerator"):
        backend_for("meta")
    with backend_for("cpu") as backend, pytest.raises(DeviceError, match="cuda:0#0"):
        backend.stream(Slot(torch.device("cuda:0")), "wrong")
