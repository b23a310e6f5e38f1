"""Every wait of the copies to a device is needed: without it the race checker finds a race, or numbers are wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import simulated_device
import torch
from accelerators import in_pinned, new_stream, wait_for
from missing_waits import leave_out, waits_in
from simulated_device.races import Watch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.device.accelerator import backend_for
from pipegraph.device.backend import Slot
from pipegraph.device.copy import copy_tree

from .test_accelerator_copies import ROWS, WIDTH, numbers

COUNT = 24
HERE = "simulated:0"


class Tagged(torch.Tensor):
    """A subclass: copied by itself, not in a slab."""


class Box:
    """An object that moves by itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> Box:
        return Box(self.x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Box:
        return Box(self.x.pin_memory())


def wrong(node: pg.Node, found: Callable[[Any], list[torch.Tensor]], own_stream: bool = True) -> int:
    """Batches with a wrong number, in a loop that never waits, on a stream of its own or the default one."""
    total = torch.zeros((), dtype=torch.int64, device=HERE)
    wait_for(HERE)
    side = new_stream(HERE) if own_stream else torch.accelerator.current_stream(HERE)
    with node.graph.loader() as loader, side:
        for number, batch in enumerate(loader):
            for tensor in found(batch):
                total += (tensor != number).any()
            del batch, tensor
        return int(total)


def _fields(batch: Any) -> list[torch.Tensor]:
    parts = list(batch) if isinstance(batch, pg.Scattered) else [batch]
    return [part[name].float() for part in parts for name in ("x", "half", "small")]


def labelled() -> pg.Node:
    """As `numbers`, and a small field that is all one number."""
    return numbers(COUNT).then(lambda batch: batch | {"small": batch["half"][:, 0].clone()})


def copied() -> int:
    return wrong(labelled().then(ops.CopyToDevice(HERE), capacity=2), _fields)


def scattered() -> int:
    return wrong(labelled().then(ops.Scatter([HERE, HERE]), capacity=2), _fields)


def subclasses() -> int:
    node = numbers(COUNT).then(lambda batch: {"x": batch["x"].clone().as_subclass(Tagged)})
    return wrong(
        node.then(ops.CopyToDevice(HERE), capacity=2), lambda batch: [batch["x"].as_subclass(torch.Tensor)]
    )


def objects() -> int:
    node = numbers(COUNT).then(lambda batch: {"box": Box(batch["x"].clone())}).then(ops.Pin())
    return wrong(node.then(ops.CopyToDevice(HERE), capacity=2), lambda batch: [batch["box"].x])


def read_by_a_stage() -> int:
    def total(batch: Any) -> torch.Tensor:
        return batch["x"].sum() / (ROWS * WIDTH)

    return wrong(numbers(COUNT).then(ops.CopyToDevice(HERE)).then(total), lambda value: [value], False)


def read_by_a_stage_and_a_loop_elsewhere() -> int:
    """The stage works on the default stream, the loop on one of its own."""

    def changed(batch: Any) -> dict[str, torch.Tensor]:
        return {"made": batch["x"].mul(2).sub(batch["x"]), "x": batch["x"]}

    node = numbers(COUNT).then(ops.CopyToDevice(HERE)).then(changed)
    return wrong(node, lambda batch: [batch["made"], batch["x"]])


def read_by_a_stage_with_a_stream() -> int:
    def total(batch: Any) -> torch.Tensor:
        with new_stream(HERE):
            return (batch["x"].sum() / (ROWS * WIDTH)).cpu()

    return wrong(numbers(COUNT).then(ops.CopyToDevice(HERE)).then(total), lambda value: [value.to(HERE)])


def kept_after_the_loader() -> int:
    """The memory of small fields, freed behind late readers, is given to whoever works on the copies' stream."""
    with labelled().then(ops.CopyToDevice(HERE), capacity=2).graph.loader() as loader:
        side = new_stream(HERE)
        with side:
            kept = [batch["small"] for batch in loader]
    with side:
        total = sum(small.float().sum() for small in kept)
        kept.clear()
    for _ in range(simulated_device.native().STREAMS):
        with new_stream(HERE):
            torch.empty(16, dtype=torch.uint8, device=HERE)
    with side:
        return int(total) != ROWS * sum(range(COUNT))


def dropped_before_it_arrives() -> int:
    """Nobody waits for a copy, whose memory is the default stream's."""
    with backend_for(HERE) as backend:
        source = in_pinned(torch.ones(ROWS, WIDTH))
        copies, arrival = copy_tree([source], backend, backend.stream(Slot(backend.device), "copy"))
        del copies, arrival
        again = torch.zeros(ROWS, WIDTH, device=HERE)
        backend.synchronize()
        return int(again.any())


PROGRAMS = [copied, scattered, subclasses, objects, read_by_a_stage, read_by_a_stage_with_a_stream]
PROGRAMS += [read_by_a_stage_and_a_loop_elsewhere, kept_after_the_loader, dropped_before_it_arrives]
SCHEDULES = int(os.environ.get("PIPEGRAPH_DEVICE_SCHEDULES", len(PROGRAMS)))
COPY, LANDING, TO_DEVICE = (
    "pipegraph/device/copy.py",
    "pipegraph/device/packed_copy.py",
    "operators/to_device.py",
)
FOUND: dict[tuple[str, str], Callable[[], int]] = {
    (COPY, "self._copied.wait(reader)"): copied,
    (COPY, "self.read_on(reader)"): copied,
    (COPY, "self._backend.read_on(buffer, stream)"): kept_after_the_loader,
    (COPY, "self._copied.synchronize()"): read_by_a_stage_with_a_stream,
    (COPY, "stream.wait_event(consumer.record_event())"): subclasses,
    (COPY, "arrival.read_on(stream)"): dropped_before_it_arrives,
    (LANDING, "self.stream.wait_event(self.backend.current_stream().record_event())"): copied,
    (LANDING, "self._reading[0][0].synchronize()"): copied,
    ("pipegraph/device/slabs.py", "writer.wait_event(event)"): copied,
    (TO_DEVICE, "landing.stream.wait_event(consumer.record_event())"): objects,
    (TO_DEVICE, "event.wait()"): read_by_a_stage,
    (TO_DEVICE, "event.synchronize()"): read_by_a_stage_with_a_stream,
    ("pipegraph/loader/epoch_pass.py", "event.delivered(item.data)"): scattered,
    (LANDING, "self._stream.record_event().wait(reader)"): read_by_a_stage_and_a_loop_elsewhere,
    (LANDING, "self._backend.read_on(tensor, reader)"): read_by_a_stage_and_a_loop_elsewhere,
}
NOT_HERE = {
    (
        LANDING,
        "self.stream.synchronize()",
    ): "the end of a stage; torch keeps pinned memory until its copies are done",
    (LANDING, "self._stream.record_event().synchronize()"): "nobody asks the host to wait for it",
    ("pipegraph/device/split.py", "event.wait()"): "in tests/replicas/test_every_wait.py",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_every_wait_numbers_are_right_and_nothing_races(
    races: Watch, program: Callable[[], int]
) -> None:
    assert program() == 0
    races.check()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_in_a_random_schedule_numbers_are_right_and_nothing_races(races: Watch, seed: int) -> None:
    simulated_device.native().schedule("random", seed)
    program = PROGRAMS[seed % len(PROGRAMS)]
    assert program() == 0
    races.check()


@pytest.mark.parametrize(("path", "line"), FOUND)
def test_a_wait_that_is_missing_is_found(
    races: Watch, monkeypatch: pytest.MonkeyPatch, path: str, line: str
) -> None:
    left_out = leave_out(monkeypatch, path, line)
    wrong_numbers = FOUND[path, line]()
    assert left_out
    assert wrong_numbers or races.races()


def test_the_table_names_every_wait() -> None:
    paths = {path for path, _ in (*FOUND, *NOT_HERE)}
    assert {(path, line) for path in paths for line in waits_in(path)} == {*FOUND, *NOT_HERE}
