"""The tuner on pipelines that run: budgets hold at every moment."""

import threading
import time
from itertools import islice

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import Operator
from pipegraph.loader import pass_totals
from pipegraph.profile import model, tuner

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    for name, seconds in (("WINDOW_S", 0.06), ("SETTLE_S", 0.01), ("LONG_S", 0.5)):
        monkeypatch.setattr(tuner, name, seconds)


class Workers:
    """Counts the open workers of several stages together."""

    def __init__(self):
        self.lock = threading.Lock()
        self.open = self.most = 0

    def change(self, by):
        with self.lock:
            self.open += by
            self.most = max(self.most, self.open)


class Costs(Operator):
    """Takes its time with each item, and is counted while it is open."""

    def __init__(self, workers, work):
        self.workers = workers
        self.work = work

    def open(self, context):
        self.workers.change(1)

    def close(self):
        self.workers.change(-1)

    def process(self, chunk):
        return chunk.replace(self.work(chunk.data))


def waits(seconds):
    def work(item):
        time.sleep(seconds)  # as storage does
        return item

    return work


def run_until(loader, items, found, most=20_000):
    """Take items until the tuner has come to where ``found`` says; fails if it does not."""
    for _ in islice(items, most):
        if found(loader.tuning()):
            return
    pytest.fail(f"not within {most} items:\n{loader.tuning()}")


def settled(tuning):
    return tuning.settled


def test_live_workers_never_exceed_what_all_stages_may_have(monkeypatch):
    monkeypatch.setattr(model, "MIN_THREADS", 7)
    monkeypatch.setattr(model, "WAITING_WORKERS", 1)
    monkeypatch.setattr(pass_totals, "cores", lambda: 2.0)
    workers, graph = Workers(), pg.Graph("waiting")
    node = graph.add(ops.FromIterable(range(10**6)), name="read")
    node.then(Costs(workers, waits(0.003)), name="a").then(Costs(workers, waits(0.006)), name="b")
    with graph.loader(autotune=True) as loader:
        run_until(loader, iter(loader), settled)
    assert workers.most <= 6  # and the source's
    assert workers.open == 0


def test_what_waits_never_exceeds_memory_limit():
    """What the workers are at work on comes on top."""
    limit, workers, graph = 24 << 20, Workers(), pg.Graph("large")

    def make(item):
        time.sleep(0.004)
        return np.zeros(1 << 20, np.uint8)

    node = graph.add(ops.FromIterable(range(10**6)), name="read").then(Costs(workers, make), name="make")
    node.then(Costs(workers, waits(0.004)), name="wait")
    with graph.loader(autotune=True, memory_limit=limit) as loader:
        run_until(loader, iter(loader), settled)
        peak = loader.profile().memory_peak_bytes
    assert 0 < peak <= limit + (workers.most << 20), workers.most
