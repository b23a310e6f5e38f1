"""Two calls in flight per actor: the same data, and each call blamed for what it did itself."""

import os
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import Context
from pipegraph.engine.actors import actor_host
from pipegraph.engine.actors.actor_host import ActorHost
from pipegraph.engine.actors.parcel import Parcel, Received
from pipegraph.engine.remote.contract import Call, Overdue
from pipegraph.engine.remote.host import Host
from pipegraph.engine.stage import parallel


@pytest.fixture
def seen(monkeypatch):
    """Counts calls sent ahead and those whose answers were asked for, with the next one taken however long items take."""
    counts, waiting = {"sent": 0, "right": 0}, set()
    ahead_of, answer = Host.ahead, Host.answer

    def sending(host, call):
        ahead_of(host, call)
        waiting.add(call)
        counts["sent"] += call.sent

    def answering(host, call, *args, **options):
        counts["right"] += call in waiting
        waiting.discard(call)
        return answer(host, call, *args, **options)

    monkeypatch.setattr(Host, "ahead", sending)
    monkeypatch.setattr(Host, "answer", answering)
    monkeypatch.setattr(parallel, "QUICK_NS", 1 << 62)
    return counts


class Squares:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return np.full(3, index**2)


def rows(fn=lambda x: x + 1, **options):
    graph = pg.Graph("g", seed=3)
    numbers = graph.add(ops.FromSequence(range(200)))
    made = numbers.then(ops.Map(fn), name="work", **{"workers": 2, **options}, backend="ray", capacity=16)
    return made.then(ops.Batch(8)).graph


def source():
    graph = pg.Graph("g", seed=3)
    return graph.add(ops.FromSequence(Squares(), shuffle=True), backend="ray").then(ops.Batch(8)).graph


def run():
    graph = pg.Graph("g", seed=3)
    numbers = graph.add(ops.FromSequence(range(200)))
    made = numbers.then(lambda x: x + 1, backend="ray").then(lambda x: x * 2, backend="ray")
    return made.then(ops.Batch(8)).graph


def outcome(graph):
    with graph.loader(epochs=2) as loader:
        return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("make", [rows, source, run])
def test_the_next_item_is_there_before_it_is_called_for(make, seen, monkeypatch):
    found = outcome(make())
    assert seen["right"]
    assert seen["right"] >= 0.9 * seen["sent"]
    monkeypatch.setattr(parallel, "QUICK_NS", -1)
    sent = seen["sent"]
    assert outcome(make()) == found
    assert seen["sent"] == sent


@pytest.mark.usefixtures("cluster")
def test_what_ends_the_actor_ahead_of_its_turn_is_blamed_and_nothing_else(seen, tmp_path):
    def work(x):
        mark = tmp_path / str(x)
        if x % 50 == 20 and not mark.exists():  # tried again, with the next bundle at the actor
            mark.touch()
            raise ValueError(x)
        if x in (72, 77):  # in that bundle
            os._exit(1)
        return x

    graph = rows(work, on_error=pg.Retry(3, then=pg.Skip(0.5)), workers=1)
    with graph.loader() as loader:
        found = [x for batch in loader for x in batch.tolist()]
        lost = sorted(each.position for each in loader.profile().quarantined)
    assert found == [x for x in range(200) if x not in (72, 77)]
    assert lost == [72, 77]
    assert seen["right"]


# -- answers in an order that no cluster can be made to give -----------------------------------


class Reference:
    def __init__(self, answer):
        self._answer = answer

    def future(self):
        return self._answer


def received(value):
    return Received(bytes(Parcel((value, {}))._stream), (), ())


class Answers:
    """An actor whose answers are given by hand."""

    def __init__(self, looks=()):
        self.calls = []
        self.look = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._look))
        self.start = SimpleNamespace(remote=self._start)
        self.call = SimpleNamespace(remote=self._call)
        self._looks = list(looks)

    def _start(self, *opening):
        opened = Future()
        opened.set_result(received(None))
        return Reference(opened)

    def _call(self, noting, parcel):
        self.calls.append(Future())
        return Reference(self.calls[-1])

    def _look(self):
        found, answer = self._looks.pop(0), Future()
        if callable(found):
            found = found(self)
        answer.set_result(found)
        return Reference(answer)

    def give(self, number, value):
        self.calls[number - 1].set_result(received(value))


@pytest.fixture
def host_of(monkeypatch):
    """A host of actors that answer by hand, with the calls that follow; it is closed at the end."""
    made = []

    def host_of(*actors, timeout_s=0.01):
        there = iter(actors)
        monkeypatch.setattr(
            actor_host.ray, "remote", lambda **_: lambda kind: SimpleNamespace(remote=lambda key: next(there))
        )
        host = ActorHost({}, Context("work"), (), timeout_s, SimpleNamespace(alive=True))
        made.append(host)
        host.start()
        return host

    yield host_of
    for host in made:
        host.close(0)


def calls():
    return Call("work", ["a"], 0, 1), Call("work", ["b"], 0, 1)


def answering(actor, *values):
    """An actor that answers its first calls at once."""
    given = iter(values)

    def call(noting, parcel):
        actor.calls.append(Future())
        value = next(given, None)
        if value is not None:
            actor.give(len(actor.calls), value)
        return Reference(actor.calls[-1])

    actor.call = SimpleNamespace(remote=call)
    return actor


def test_a_call_behind_one_that_hangs_is_sent_again_and_not_blamed(host_of):
    actor = answering(Answers([(2, 0, 9.0, "in hang")]), "first")
    host, (first, second) = host_of(actor, answering(Answers(), "again")), calls()
    host.begin(first)
    host.ahead(second)
    assert host.answer(first) == "first"
    assert host.answer(Call("work", "a row of the first again")) == "again"
    assert len(actor.calls) == 3
    with pytest.raises(Overdue):
        host.answer(second)
