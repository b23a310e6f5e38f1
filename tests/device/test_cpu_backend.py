"""The CPU as a device: whatever it is given is done when the call returns."""

from __future__ import annotations

import threading

import pytest
import torch

from pipegraph.device.backend import Slot, slots_on
from pipegraph.device.opening import backend_for
from pipegraph.errors import DeviceError

CPU = torch.device("cpu")


def test_work_is_done_when_it_is_given_and_marks_are_reached() -> None:
    with backend_for("cpu") as backend:
        stream, other = backend.stream(Slot(CPU), "a"), backend.stream(Slot(CPU, 1), "b")
        event = backend.event()
        assert event.query()  # never recorded
        source, target = torch.randn(5, requires_grad=True), torch.zeros(5)
        with torch.no_grad(), backend.use(stream):
            backend.copy(target, source)
        assert torch.equal(target, source.detach()) and not target.requires_grad
        assert stream.record_event(event) is event and event.query()
        other.wait_event(event)
        event.wait()
        event.synchronize()
        seen: list[str] = []
        with backend.use(other):
            other.run(lambda: seen.append(threading.current_thread().name))
        assert seen == [threading.current_thread().name]
        stream.synchronize()
    assert repr(stream) == "<stream 'a' on cpu#0>"


def test_a_failure_is_raised_where_the_work_is_given() -> None:
    with backend_for("cpu") as backend, pytest.raises(ZeroDivisionError):
        backend.stream(Slot(CPU), "a").run(lambda: 1 / 0)


def test_a_closed_backend_gives_no_streams() -> None:
    backend = backend_for("cpu")
    backend.close()
    backend.close()
    with pytest.raises(DeviceError, match="the backend of cpu is closed"):
        backend.stream(Slot(CPU), "late")


def test_slots_are_numbered_on_their_device() -> None:
    assert [str(slot) for slot in slots_on(["cuda", "cpu", 0, "cpu", "cuda:1"])] == [
        "cuda:0#0",
        "cpu#0",
        "cuda:0#1",
        "cpu#1",
        "cuda:1#0",
    ]


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(
        DeviceError, match="'meta:0' is not on this machine, which (has no accelerator|offers .*:0)"
    ):
        backend_for("meta")
    with backend_for("cpu") as backend, pytest.raises(DeviceError, match="cuda:0#0"):
        backend.stream(Slot(torch.device("cuda:0")), "wrong")
