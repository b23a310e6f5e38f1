"""An order of the user's own, which says only what lies where: dealt to ranks, resumed at other world sizes, prefetched."""

import dataclasses

import numpy as np

import pipegraph as pg
from pipegraph import operators as ops


@dataclasses.dataclass(frozen=True)
class Backwards(pg.order.Order):
    """Every epoch from the last sample to the first, begun one sample later each time."""

    def config(self):
        return {"order": "Backwards"}

    def draw(self, layout, positions, seed, epoch):
        return (-1 - epoch - positions) % pg.order.total_samples(layout)


def test_what_is_left_is_dealt_to_another_number_of_ranks():
    order = Backwards()
    history = [(4, 1)]
    left = [order.indices(10, rank=rank, world_size=2, history=history) for rank in range(2)]
    assert np.stack(left, 1).ravel().tolist() == [5, 4, 3, 2, 1, 0]


def test_a_loader_resumes_with_it_at_another_world_size():
    def graph():
        made = pg.Graph("own order")
        made.add(ops.FromSequence(range(24), order=Backwards()))
        return made

    states, seen = [], []
    for rank in range(3):
        with graph().loader(rank=rank, world_size=3) as loader:
            items = iter(loader)
            seen += [next(items) for _ in range(2)]
            states.append(loader.state_dict())
    for rank in range(2):
        with graph().loader(rank=rank, world_size=2) as loader:
            loader.load_state_dict(states)
            seen += list(loader)
    assert list(range(24)) == sorted(seen)
