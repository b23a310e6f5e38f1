"""What the callbacks for trainers save, without a trainer."""

import threading

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.loader.in_transformers import _Passes


class Turning:
    """A sampler with another order in each epoch, which it counts; ``ends`` is set once it may say where it ends."""

    def __init__(self):
        self.epoch, self.drawn, self.ends = 0, 0, threading.Event()

    def __len__(self):
        return 4

    def __iter__(self):
        for self.drawn in range(1, 5):
            yield 10 * self.epoch + self.drawn
        self.epoch, self.drawn = self.epoch + 1, 0

    def state_dict(self):
        if threading.current_thread() is not threading.main_thread() and self.epoch and not self.drawn:
            assert self.ends.wait(60)
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def test_a_state_behind_the_last_batch_knows_the_next_order_or_is_of_this_epoch():
    """The source may still be about to end: then it does not know where the next epoch begins."""

    def made(sampler):
        graph = pg.Graph("g")
        graph.add(ops.FromSequence(range(100), sampler=sampler), name="rows").then(ops.Batch(2, collate=list))
        return graph.loader(epochs=2)

    sampler = Turning()
    with made(sampler) as loader:
        passes = _Passes(loader)
        batches = iter(passes)
        assert [next(batches), next(batches)] == [[1, 2], [3, 4]]
        state = passes.state()
        sampler.ends.set()
        assert list(batches) == []
    (other := Turning()).ends.set()
    with made(other) as loader:
        passes = _Passes(loader)
        passes.load(state)
        assert list(passes) == [[11, 12], [13, 14]]
