"""Every wait of the replicas is needed: without it the race checker finds a race, or numbers are wrong."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import simulated_device
import torch
from accelerators import in_pinned, wait_for
from channel_states import wait_until
from missing_waits import ROOT, leave_out, waits_in
from simulated_device.races import Watch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.device.accelerator import backend_for
from pipegraph.device.backend import slots_on
from pipegraph.device.copy import copy_tree
from pipegraph.device.split import Scattered
from pipegraph.replicas import ReplicaExecutor
from pipegraph.replicas.reduce_streams import ReduceStreams, plan_buckets

from .conftest import assert_close
from .test_accelerator_replicas import adamw, batch, mean_loss, model, on_x, sgd, there

HERE = "simulated:0"
PLACES = [HERE, HERE, "simulated:1"]
STEPS = (0, 1, 2, 3, 2, 0)
"""Numbers of batches: one of them has fewer rows than there are replicas."""


def trained(steps: tuple[int, ...] = STEPS, optimizer: Any = sgd, clip: float | None = 0.3) -> None:
    alone = model()
    theirs = optimizer(alone.parameters())
    with ReplicaExecutor(model(), PLACES, optimizer=optimizer) as executor:
        for step in steps:
            theirs.zero_grad()
            mean_loss(on_x(alone, there(batch(step))), there(batch(step))).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
            theirs.step()
            executor.step(batch(step), mean_loss, on_x, clip_norm=clip)
        assert_close(executor, alone)


def adapted() -> None:
    trained(optimizer=adamw)


def unclipped() -> None:
    trained(clip=None)


def idle_at_first() -> None:
    trained((2, 0), clip=None)


def lanes() -> None:
    """Gradients of the next step come on streams that have not waited for the sums of the last."""
    slots = slots_on(PLACES)
    backends = {slot.device: backend_for(slot.device) for slot in slots}
    sums = ReduceStreams(slots, backends)
    grads = [torch.ones(8, device=slot.device) for slot in slots]
    live = sums.make(plan_buckets([torch.empty(8)], [0], 3)[0], [[grad] for grad in grads])
    for place in PLACES:
        wait_for(place)
    for _ in range(3):
        for replica, slot in enumerate(slots):
            backend = backends[slot.device]
            with backend.use(backend.stream(slot, "compute")):
                sums.put(live, replica, 0, grads[replica])
                sums.arrived(live, replica)
        sums.launch(live, [0, 1, 2])
    sums.await_filled(live)
    assert live.views[live.plan.owner][0].tolist() == [3] * 8
    for backend in backends.values():
        backend.close()


def scattered_batches() -> None:
    """Parts on their way on streams of copies, which the replicas' streams have not waited for."""
    alone = model()
    theirs = sgd(alone.parameters())
    slots = slots_on(PLACES)
    backends = {slot.device: backend_for(slot.device) for slot in slots}
    streams = [backends[slot.device].stream(slot, "copy") for slot in slots]
    with ReplicaExecutor(model(), PLACES, optimizer=sgd) as executor:
        for step in (0, 1, 3):
            whole = batch(step)
            theirs.zero_grad()
            mean_loss(on_x(alone, there(whole)), there(whole)).backward()
            theirs.step()
            rows = -(-len(whole["x"]) // len(slots))
            parts = [
                {k: in_pinned(v[n * rows :][:rows]) for k, v in whole.items()} for n in range(len(slots))
            ]
            made = [
                copy_tree(part, backends[s.slot.device], s) for part, s in zip(parts, streams, strict=True)
            ]
            scattered = Scattered([part for part, _ in made], PLACES, [arrival for _, arrival in made])
            executor.step(scattered, mean_loss, on_x)
        assert_close(executor, alone)
    for backend in backends.values():
        backend.close()


def own_backwards() -> None:
    """Nobody but the graph holds the inputs, whose memory is the caller's: a backward frees it while replicas read it."""
    torch.manual_seed(0)
    alone = (
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double().to(HERE)
    )
    with ReplicaExecutor(copy.deepcopy(alone), [HERE, HERE]) as executor:
        for called in (alone, executor):
            first, second = (called(torch.ones(rows, 4, dtype=torch.double, device=HERE)) for rows in (4, 6))
            (first.sum() + second.sum()).backward()
        for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)


def copied_batches() -> None:
    """Nobody but the graph holds the inputs, which lie in a slab: in the backward it is given back, and written again."""
    torch.manual_seed(0)
    alone = torch.nn.Linear(64, 2).double().to(HERE)
    inputs = torch.rand(6, 6, 64, dtype=torch.double)
    goes = threading.Semaphore(1)

    def one_at_a_time(x: torch.Tensor) -> torch.Tensor:
        assert goes.acquire(timeout=30)
        return x.clone()

    graph = pg.Graph()
    graph.add(ops.FromSequence(list(inputs))).then(one_at_a_time, capacity=1).then(ops.CopyToDevice(HERE))
    with ReplicaExecutor(copy.deepcopy(alone), [HERE, HERE]) as executor, graph.loader() as loader:
        passing = iter(loader)

        def next_is_copied(weight: torch.Tensor) -> None:
            goes.release()
            wait_until(loader._crew.run.terminal, lambda stats: stats.depth > 0)

        # The last that the backward makes: the inputs are not needed any more.
        executor.module.weight.register_post_accumulate_grad_hook(next_is_copied)
        for x in inputs:
            alone(x.to(HERE)).sum().backward()
            executor(next(passing)).sum().backward()
        for mine, its in zip(executor.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)


PROGRAMS = [
    trained,
    adapted,
    unclipped,
    scattered_batches,
    idle_at_first,
    lanes,
    own_backwards,
    copied_batches,
]
SCHEDULES = int(os.environ.get("PIPEGRAPH_DEVICE_SCHEDULES", len(PROGRAMS)))
SUMS = "pipegraph/replicas/reduce_streams.py"
STREAMS = "pipegraph/replicas/runner.py"
FOUND: dict[tuple[str, str], Callable[[], None]] = {
    (SUMS, "stream.wait_event(backend.current_stream().record_event())"): idle_at_first,
    (SUMS, "self._side[replica].wait_event(event)"): unclipped,
    (SUMS, "self._side[live.plan.owner].wait_event(event)"): unclipped,
    (SUMS, "stream.wait_event(live.summed)"): unclipped,
    (SUMS, "event.wait()"): unclipped,
    (SUMS, "event.wait(self._backends[live.plan.owner].current_stream())"): trained,
    (SUMS, "event.wait(stream)"): lanes,
    (SUMS, "stream.wait_event(self._used[replica])"): unclipped,
    (STREAMS, "backend.read_on(tensor, stream)"): own_backwards,
    (STREAMS, "stream.wait_event(callers.record_event())"): unclipped,
    (
        STREAMS,
        "stream.record_event().wait(self.backends[self.slots[replica].device].current_stream())",
    ): unclipped,
    ("pipegraph/device/split.py", "event.wait()"): scattered_batches,
}
NOT_HERE = {
    (SUMS, "stream.synchronize()"): "after a failed step; no program here fails while sums are under way",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_every_wait_numbers_are_right_and_nothing_races(
    races: Watch, program: Callable[[], None]
) -> None:
    program()
    races.check()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_in_a_random_schedule_numbers_are_right_and_nothing_races(races: Watch, seed: int) -> None:
    simulated_device.native().schedule("random", seed)
    program = PROGRAMS[seed % len(PROGRAMS)]
    program()
    races.check()


@pytest.mark.parametrize(("path", "line"), FOUND)
def test_a_wait_that_is_missing_is_found(
    races: Watch, monkeypatch: pytest.MonkeyPatch, path: str, line: str
) -> None:
    left_out = leave_out(monkeypatch, path, line)
    noticed = False
    try:
        FOUND[path, line]()
    except Exception:  # poison is no index, for one
        noticed = True
    assert left_out
    assert noticed or races.races()


def test_the_table_names_every_wait() -> None:
    paths = {str(path.relative_to(ROOT)) for path in (ROOT / "pipegraph" / "replicas").glob("*.py")}
    paths.add("pipegraph/device/split.py")
    assert {(path, line) for path in paths for line in waits_in(path)} == {*FOUND, *NOT_HERE}
