"""What the callbacks for trainers save, without a trainer."""

import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.loader.in_transformers import _Passes


def test_a_state_behind_the_last_batch_continues_with_the_next_order_of_a_samplers_generator():
    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        sampler = torch.utils.data.RandomSampler(range(100), generator=generator)
        graph = pg.Graph("g")
        graph.add(ops.FromSequence(range(100), sampler=sampler), name="rows").then(
            ops.Batch(25, collate=list)
        )
        return graph.loader(epochs=2)

    with made(1) as loader:
        passes = _Passes(loader)
        batches = iter(passes)
        first = [next(batches) for _ in range(4)]
        state = passes.state()
        assert list(batches) == []
        second = list(passes)
    with made(2) as loader:
        passes = _Passes(loader)
        passes.load(state)
        assert list(passes) == second != first
