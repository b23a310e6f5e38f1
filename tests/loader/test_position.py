"""progress.py: a state may be taken at any moment, in any thread and in a signal handler."""

import json
import sys
import threading
from pathlib import Path

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from tests.loader.counting import Counting

pytestmark = pytest.mark.usefixtures("no_leaks")

ENGINE = str(Path(pg.__file__).parent)


def breaks(x):
    if x % 3 == 1:
        raise ValueError(x)
    return x


def plain(graph):
    return graph.add(ops.FromIterable(range(6)), backend="inline").then(
        lambda x: 2 * x, name="double", backend="inline"
    )


def budgeted(graph):
    rows = graph.add(ops.FromSequence(range(8)), backend="inline")
    return rows.then(breaks, name="breaks", on_error=pg.Skip(4), backend="inline").then(
        ops.Batch(2, collate=list), backend="inline"
    )


def unordered(graph):
    loose = graph.add(ops.FromSequence(range(6))).then(
        lambda x: x, name="loose", workers=2, ordered=False, on_error=pg.Skip()
    )
    return loose.then(breaks, name="breaks", on_error=pg.Skip(), backend="inline")


class Few(Counting):
    end = 70


def iterator(graph):
    numbers = graph.add(ops.FromIterable(Few), backend="inline")
    return numbers.then(ops.Batch(10, collate=list), backend="inline")


def loader_of(make, epochs=2):
    graph = pg.Graph("g")
    make(graph)
    return graph.loader(epochs=epochs)


def flat(items):
    return [x for item in items for x in (item if isinstance(item, list) else [item])]


def at_every_line(call, run):
    """Runs ``run`` and, as a signal handler could, ``call`` before every line that the engine executes meanwhile."""

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if event == "line":
            call()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return run()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("make", [plain, budgeted, unordered, iterator])
def test_a_state_between_any_two_lines_of_the_consumers_thread_is_exact(make):
    with loader_of(make) as loader:
        whole = [flat(loader), flat(loader)]
    got = [[], []]
    found = {}

    with loader_of(make) as loader:
        epoch = 0

        def look():
            state = json.dumps(loader.state_dict())
            part = json.loads(state)["rank0"]
            assert make is not plain or part["chunks"] == (part["cursor"] or 0)
            # What is under way counts as delivered or not.
            found.setdefault(state, set()).add((epoch, len(got[epoch])))

        def run():
            nonlocal epoch
            for epoch in range(2):
                for item in loader:
                    got[epoch] += flat([item])
            epoch = 1

        at_every_line(look, run)
    assert [sorted(each) for each in got] == [sorted(each) for each in whole]

    for state, seen in found.items():
        with loader_of(make) as loader:
            loader.load_state_dict(json.loads(state))
            at = loader.epoch
            rest = flat(loader)
        if at == 2:
            assert all(e == 1 for e, _ in seen)
            continue
        done = len(whole[at]) - len(rest)
        if make is unordered:
            assert len(set(rest)) == len(rest) and set(rest) <= set(whole[at])
        else:
            assert rest == whole[at][done:]
        sizes = {len(flat([whole[at]])[:n]) for n in range(done + 1)}
        for e, n in seen:
            # Of the epoch before everything was delivered; of this one what was handed over, or one chunk more.
            assert e <= at and (n == len(whole[e]) if e < at else n <= done), (e, n, at, done)
        assert done in sizes


def test_any_thread_may_take_states_while_a_pass_runs():
    states, done = [], threading.Event()

    def watch():
        while not done.is_set():
            states.append(json.dumps(loader.state_dict()))

    with loader_of(unordered) as loader:
        watcher = threading.Thread(target=watch)
        watcher.start()
        whole = [sorted(loader), sorted(loader)]
        done.set()
        watcher.join(30)
        assert not watcher.is_alive()
    for state in dict.fromkeys(states):
        with loader_of(unordered) as loader:
            loader.load_state_dict(json.loads(state))
            epoch = loader.epoch
            rest = list(loader)
            assert len(set(rest)) == len(rest) and set(rest) <= set(whole[min(epoch, 1)])
