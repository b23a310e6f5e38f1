"""Two calls in flight: a process has its next item at hand while it works."""

import itertools
import os
import signal
import threading

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.remote.host import Host
from pipegraph.engine.stage import parallel
from tests.process.process_pipelines import pipeline

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def seen(monkeypatch):
    """Counts calls sent ahead, those whose answers were asked for, and those answered before another's turn."""
    counts, lock, waiting = {"sent": 0, "right": 0, "early": 0}, threading.Lock(), set()
    ahead_of, answer, take = Host.ahead, Host.answer, Host._take_answer

    def count(name, more):
        with lock:  # each worker's thread counts here
            counts[name] += more

    def sending(host, call):
        ahead_of(host, call)
        waiting.add(call)
        count("sent", call.sent)

    def answering(host, call, *args, **options):
        count("right", call in waiting)
        waiting.discard(call)
        return answer(host, call, *args, **options)

    def taking(host, timeout_s):
        count("early", host._due[0] in waiting)
        take(host, timeout_s)

    monkeypatch.setattr(Host, "ahead", sending)
    monkeypatch.setattr(Host, "answer", answering)
    monkeypatch.setattr(Host, "_take_answer", taking)
    monkeypatch.setattr(parallel, "QUICK_NS", 1 << 62)  # however long items take here
    return counts


class Squares:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return np.full(3, index**2)


def rows(fn=lambda x: x + 1, items=200, **options):
    return pipeline(fn, items=range(items), capacity=16, **options).tail.then(ops.Batch(8)).graph


def one_by_one():
    return pipeline(lambda x: x + 1, items=range(200), capacity=16)


def source(batched):
    graph = pg.Graph("g", seed=3)
    data = graph.add(ops.FromSequence(Squares(), shuffle=True), workers=2, backend="process")
    if batched:
        data.then(ops.Batch(8))
    return graph


def run():
    tail = pipeline(lambda x: x + 1, items=range(200), capacity=16).tail
    return tail.then(lambda x: x * 2, workers=2, backend="process").then(ops.Batch(8)).graph


def outcome(graph, passes=2):
    with graph.loader() as loader:
        return [[np.asarray(item).tolist() for item in loader] for _ in range(passes)]


@pytest.mark.parametrize("make", [rows, one_by_one, lambda: source(True), lambda: source(False), run])
def test_the_next_item_is_there_before_it_is_called_for(make, seen, monkeypatch):
    found = outcome(make())
    assert seen["right"]
    assert seen["right"] >= 0.9 * seen["sent"]
    monkeypatch.setattr(parallel, "QUICK_NS", -1)
    sent = seen["sent"]
    assert outcome(make()) == found
    assert seen["sent"] == sent


def test_a_row_that_is_tried_again_while_the_next_bundle_is_there(seen, tmp_path):
    def fails_once(x):
        mark = tmp_path / str(x)
        if x % 5 == 0 and not mark.exists():
            mark.touch()
            raise ValueError(x)
        return x

    found = outcome(rows(fails_once, on_error=pg.Retry(2)), passes=1)
    assert list(itertools.chain(*found[0])) == list(range(200))
    assert seen["early"]


def test_what_kills_the_process_ahead_of_its_turn_is_blamed_and_nothing_else(seen, tmp_path):
    def work(x):
        mark = tmp_path / str(x)
        if (
            x % 50 == 20 and not mark.exists()
        ):  # its row is tried again, and finds the next bundle at the worker
            mark.touch()
            raise ValueError(x)
        if x % 50 in (22, 27, 33):  # which ends the process, every time
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    graph = rows(work, on_error=pg.Retry(3, then=pg.Skip(0.5)), workers=1)
    with graph.loader() as loader:
        found = [x for batch in loader for x in batch.tolist()]
        lost = sorted(each.position for each in loader.profile().quarantined)
    dead = [x for x in range(200) if x % 50 in (22, 27, 33)]
    assert found == [x for x in range(200) if x not in dead]
    assert lost == dead
    assert seen["right"]
