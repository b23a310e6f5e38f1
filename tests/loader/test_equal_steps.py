"""agreement.py and its pass: all ranks end at the same step, and nothing runs on behind it."""

import gc
import itertools
import json
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
        monkeypatch.setattr("pipegraph.loader.equal_steps.own_group", lambda world_size: [0])
        monkeypatch.setattr("pipegraph.loader.equal_steps.minimum_over", self.minimum_over)

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
                    return list(map(min, *self.rounds[number]))

            return read

        return begin

    def run(self, *jobs):
        """What each job returns, each in a thread of its own; raises the first error."""
        found, errors = {}, []

        def work(rank):
            try:
                found[rank] = jobs[rank](rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "the ranks hang"
        return [found[rank] for rank in range(self.size)]

    def together(self, job):
        return self.run(*[job] * self.size)


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


def test_ranks_that_leave_a_pass_at_different_steps_are_an_error(monkeypatch):
    def job(steps):
        def run(rank):
            with loader_of(lambda epoch: range(400), rank, []) as loader:
                try:
                    assert len(list(itertools.islice(loader, steps))) == steps
                    list(loader)
                except pg.errors.DataError as error:
                    return str(error)

        return run

    for rank, text in enumerate(Ranks(2, monkeypatch).run(job(1), job(380))):
        assert f"rank {rank} of 2 is in epoch {1 - rank}, all are in epochs 0 to 1." in text
        assert "leave passes at the same step on all ranks" in text


RANK = """
import json, sys, warnings
import torch.distributed as dist
import pipegraph as pg
from pipegraph import operators as ops

rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
warnings.simplefilter("ignore")

def loader_of():
    graph = pg.Graph("g")
    source = ops.FromSequence(range(8)) if mode == "known" else ops.FromIterable(range(8))
    graph.add(source).then(ops.Filter(lambda x: True))
    return graph.loader(equal_steps=True, epochs=4)

with loader_of() as loader:
    for _ in loader:
        inside = loader.state_dict()
    after = loader.state_dict()
    if mode != "the same loader":
        loader.close()
        loader = loader_of()
    with loader:
        loader.load_state_dict(after if rank else inside)
        error, found = "", []
        try:
            found.append(list(loader))
        except pg.errors.DataError as raised:
            error = str(raised)
            loader.set_epoch(1)  # the remedy
        for epoch in range(loader.epoch, 3):
            found.append(list(loader))
print(json.dumps([error, found]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("mode", ["known", "unknown", "the same loader"])
def test_ranks_in_different_epochs_lose_none_in_silence(programs, tmp_path, mode):
    """A state from inside the loop, after its last step, belongs to that epoch; one from after the loop to the next."""
    ranks = [programs.start(RANK, rank, tmp_path / "store", mode) for rank in range(2)]
    for rank, process in enumerate(ranks):
        with process:
            out, err = process.communicate()
            assert process.returncode == 0, err
        error, found = json.loads(out)
        assert error.startswith(
            "equal_steps=True: the ranks are in different epochs, and would end one of them before all of it was "
            f"delivered: rank {rank} of 2 is in epoch {rank}, all are in epochs 0 to 1. Load on all ranks states "
        )
        assert error.endswith("call set_epoch() with the same number on every rank")
        assert sorted(map(len, found)) == [4, 4]
