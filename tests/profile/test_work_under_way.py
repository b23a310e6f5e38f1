"""What a profile says while workers are in the middle of their work. The clock is the test's."""

import importlib
import pkgutil
import sys
import threading
from contextlib import ExitStack
from unittest import mock

import pytest
from gates import Gate

import pipegraph as pg
import pipegraph.engine
from pipegraph import operators as ops

SECOND = 10**9


class Clock:
    """``perf_counter_ns`` of all of pipegraph; it stands still until the test moves it."""

    def __init__(self):
        self.now = SECOND

    def __call__(self):
        return self.now

    def moves(self, seconds):
        self.now += seconds * SECOND


@pytest.fixture
def clock():
    clock = Clock()
    for each in pkgutil.walk_packages(pipegraph.engine.__path__, "pipegraph.engine."):
        if ".kinds" in each.name or ".stage" in each.name:
            importlib.import_module(each.name)  # modules that are imported at first need
    with ExitStack() as stack:
        for name, module in sorted(sys.modules.items()):
            if name.startswith("pipegraph") and "perf_counter_ns" in vars(module):
                stack.enter_context(mock.patch.object(module, "perf_counter_ns", clock))
        yield clock


def until(channel, condition):
    """Wait until a condition on the queue's statistics holds."""
    found = threading.Event()
    channel.changed = lambda: condition(channel.look()) and found.set()
    if not condition(channel.stats()):
        assert found.wait(30)
    channel.changed = None


def until_each_waits(loader, **gets):
    """Wait until each stage, in order, and then the training loop, has taken so many items and waits for more."""
    run = loader._crew.run
    for name, taken in gets.items():
        channel = run.terminal if name == "training" else run.channels[name, 0]
        until(channel, lambda stats, taken=taken: stats.gets == taken and stats.getters_waiting == 1)


class Pass:
    """A pass in another thread."""

    def __init__(self, loader):
        self.got = []
        self._thread = threading.Thread(target=self._run, args=(loader,), daemon=True)
        self._thread.start()

    def _run(self, loader):
        for each in loader:
            self.got.append(each)

    def ended(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.got


def test_a_stage_that_hangs_is_busy_and_holds_training_back(clock):
    gate = Gate()
    graph = pg.Graph("hangs")
    node = graph.add(ops.FromSequence(range(6)), name="read").then(gate, name="hang").then(abs, name="after")
    node.then(ops.Batch(2), name="batch")
    with graph.loader() as loader:
        gate.release(2)
        running = Pass(loader)
        assert gate.wait_until_waiting(1) == [2]
        until_each_waits(loader, after=2, batch=2, training=1)
        before = loader.profile().stages["hang"]
        clock.moves(100)
        found = loader.profile()
        gate.release_all()
        assert len(running.ended()) == 3
    hanging = found.stages["hang"]
    assert hanging.busy == 1.0 and found.bottleneck == "hang"
    assert "'hang' holds training back: its worker is busy 100 % of the time" in found.conclusion
    assert hanging.service_mean_s == before.service_mean_s  # of items that came back
