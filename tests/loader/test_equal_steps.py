"""agreement.py and its pass: all ranks end at the same step, and nothing runs on behind it."""

import gc
import itertools
import threading

import pytest

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.usefixtures("no_leaks")


class Ranks:
    """What ranks do by an all_reduce, between threads of this process."""

    def __init__(self, size, monkeypatch):
        self.size = size
        self.condition = threading.Condition()
        self.rounds = []
        self.rank = threading.local()
        monkeypatch.setattr("pipegraph.loader.loader.own_group", lambda world_size: [0])
        monkeypatch.setattr("pipegraph.loader.epoch_pass.minimum_over", self.minimum_over)

    def minimum_over(self, made):
        def begin(value):
            number = made[0]
            made[0] += 1
            with self.condition:
                while len(self.rounds) <= number:
                    self.rounds.append([])
                self.rounds[number].append(value)
                self.condition.notify_all()

            def read():
                with self.condition:
                    assert self.condition.wait_for(lambda: len(self.rounds[number]) == self.size, 30)
                    return min(self.rounds[number])

            return read

        return begin

    def run(self, *jobs):
        """What each job returns, each in a thread of its own."""
        found = {}

        def work(rank):
            found[rank] = jobs[rank](rank)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert not any(thread.is_alive() for thread in threads), "the ranks hang"
        return [found[rank] for rank in range(self.size)]


def loader_of(items, rank, calls, epochs=2):
    def work(x):
        calls.append(x)
        return x

    graph = pg.Graph("g")
    rows = graph.add(ops.FromIterable(items, shard=False), capacity=4)
    kept = rows.then(ops.Filter(lambda x: True), capacity=4).then(work, name="work", workers=2, capacity=4)
    kept.then(lambda x: x, name="last", capacity=4)
    return graph.loader(equal_steps=True, rank=rank, world_size=2, epochs=epochs)


@pytest.mark.parametrize("more", [lambda epoch: range(2000), lambda epoch: itertools.count()])
def test_stages_stop_where_the_ranks_have_agreed_to_end(monkeypatch, more):
    calls = [[], []]

    def job(items):
        def run(rank):
            with loader_of(items, rank, calls[rank]) as loader:
                return [list(loader), list(loader)]

        return run

    one, other = Ranks(2, monkeypatch).run(job(lambda epoch: range(40)), job(more))
    assert one == other == [list(range(40))] * 2
    # What was under way when the ranks agreed, twice, and no more.
    assert len(calls[1]) < 2 * (40 + 4 * 6)


def test_a_pass_that_is_broken_off_is_noticed_at_once(monkeypatch):
    def run(rank):
        with loader_of(lambda epoch: range(40), rank, []) as loader:
            for _ in loader:
                break
            return loader.epoch, list(loader)

    gc.disable()
    try:
        assert Ranks(2, monkeypatch).run(run, run) == [(1, list(range(40)))] * 2
    finally:
        gc.enable()


def test_a_pass_that_delivered_nothing_takes_part_in_no_agreement(monkeypatch):
    def run(times):
        def job(rank):
            with loader_of(lambda epoch: range(9), rank, []) as loader:
                for _ in range(times):
                    iter(loader)
                return list(loader)

        return job

    assert Ranks(2, monkeypatch).run(run(2), run(0)) == [list(range(9))] * 2
