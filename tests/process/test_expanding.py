"""Expanding stages in processes: one call begins several chunks, and nothing else changes."""

import os
import signal

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.remote.host import Host

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def calls(monkeypatch):
    """The names of the calls, in their order."""
    made, answer = [], Host.answer

    def answering(host, call, *args, **options):
        made.append(call.name)
        return answer(host, call, *args, **options)

    monkeypatch.setattr(Host, "answer", answering)
    return made


def children(x):
    """None, few, and now and then more than one answer holds."""
    return [(x, child) for child in range(300 if x % 40 == 7 else x % 4)]


@pytest.mark.parametrize("trouble", ["none", "skipped", "tried again", "killed"])
def test_several_chunks_are_begun_in_one_call_whatever_becomes_of_them(trouble, calls, tmp_path):
    def work(x):
        mark = tmp_path / str(x)
        for index, child in enumerate(children(x)):
            if x % 10 in (5, 6) and index == x % 10 - 5 and (trouble == "skipped" or not mark.exists()):
                mark.touch()
                if trouble == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if trouble != "none":
                    raise ValueError(x)
            yield child

    policy = {"skipped": pg.Skip(0.5), "tried again": pg.Retry(2)}.get(trouble, "raise")
    graph = pg.Graph("documents")
    graph.add(ops.FromSequence(range(120))).then(ops.FlatMap(work), backend="process", on_error=policy)
    with graph.loader() as loader:
        found = [tuple(row) for row in loader]
    lost = (
        [(x, child) for x in range(120) if x % 10 in (5, 6) for child in range(x % 10 - 5, x % 4)]
        if trouble == "skipped"
        else []
    )
    assert found == [each for x in range(120) for each in children(x) if each not in lost]
    assert calls.count("expand_all") > 3


def windows(x):
    return [
        {"key": f"{x}-{n}", "part": np.full(4, x + n), "random": float(torch.rand(()))} for n in range(x % 5)
    ]


class WithKeys(pg.Operator):
    """Adds the keys of a batch to it."""

    def process(self, chunk):
        return chunk.replace(chunk.data | {"keys": chunk.keys})


class Windows(pg.Operator):
    """As ``FlatMap(windows)``, which gives the children their keys itself."""

    kind, needs, gives, one_to_one = "expand", "sample", "sample", False

    def process(self, chunk):
        for number, each in enumerate(windows(chunk.data)):
            yield chunk.child(number, each)


def windows_in(backend, own=False):
    graph = pg.Graph("documents")
    work = Windows() if own else ops.FlatMap(windows)
    rows = graph.add(ops.FromSequence(range(1000), shuffle=True)).then(work, backend=backend)
    rows.then(ops.Batch(7)).then(WithKeys())
    return graph.loader()


def plain(batches):
    return [(each["key"], each["part"].tolist(), each["random"].tolist(), each["keys"]) for each in batches]


@pytest.mark.parametrize("own", [False, True])
def test_children_of_processes_are_those_of_threads_and_so_are_the_states_between_them(own, calls):
    with windows_in("thread", own) as loader:
        expected = plain(loader)
    states = {}
    with windows_in("process", own) as loader:
        for number, batch in enumerate(loader, 1):
            assert plain([batch]) == expected[number - 1 : number]
            if number % 50 == 1:
                states[number] = loader.state_dict()
    assert calls.count("expand_all") > 3
    for number, state in states.items():
        with windows_in("process" if number % 100 == 1 else "thread", own) as loader:
            loader.load_state_dict(state)
            assert plain(loader) == expected[number:]


def test_lists_are_padded_alike_however_they_come():
    graph = pg.Graph("lists")
    work = ops.FlatMap(lambda x: [[x] * 3] * 2)
    graph.add(ops.FromSequence(range(400))).then(work, backend="process").then(ops.Batch(8, pad=0))
    with graph.loader() as loader:
        assert {tuple(batch.shape) for batch in loader} == {(8, 3)}


def test_large_children_stay_within_the_memory_limit():
    graph = pg.Graph("windows")
    work = ops.FlatMap(lambda x: [np.full(4000, x) for _ in range(x % 5)])
    graph.add(ops.FromSequence(range(600))).then(work, backend="process").then(ops.Batch(3))
    with graph.loader(memory_limit=8_000_000) as loader:
        assert sum(map(len, loader)) == 1200
