"""StridedOrder against the class that it equals."""

from __future__ import annotations

import random

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from pipegraph.errors import GraphError, StateError
from pipegraph.order import StridedOrder

CASES = 20_000


def test_it_equals_distributed_sampler_index_for_index_in_20000_random_cases():
    draw = random.Random(1)
    tiny = 0
    for case in range(CASES):
        n = draw.randint(1, 12) if case % 2 else draw.randint(1, 400)
        world_size = draw.randint(1, 24)
        rank = draw.randrange(world_size)
        seed, epoch = draw.randrange(2**31), draw.randrange(100)
        shuffle, drop_last = draw.random() < 0.7, draw.random() < 0.5
        tiny += n < world_size
        sampler = DistributedSampler(range(n), world_size, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        order = StridedOrder(shuffle=shuffle, drop_last=drop_last)
        ours = order.indices(n, seed, epoch, rank, world_size)
        assert ours.tolist() == list(sampler), (n, world_size, rank, seed, epoch, shuffle, drop_last)
        assert order.length(n, world_size) == len(sampler)
    assert tiny > CASES // 10


def test_it_equals_distributed_sampler_on_a_large_set():
    n = 300_001
    sampler = DistributedSampler(range(n), 7, 5, True, 3)  # type: ignore[arg-type]
    sampler.set_epoch(2)
    np.testing.assert_array_equal(StridedOrder().indices(n, 3, 2, 5, 7), np.fromiter(sampler, np.int64))


def test_positions_of_padded_places_are_at_least_n_and_repeat_the_head():
    order = StridedOrder()
    positions = np.sort(np.concatenate([order.positions(5, rank=r, world_size=4) for r in range(4)]))
    assert positions.tolist() == list(range(8))
    head = order.samples_at(5, np.arange(3, dtype=np.int64), seed=9, epoch=4)
    padded = order.samples_at(5, np.arange(5, 8, dtype=np.int64), seed=9, epoch=4)
    assert head.tolist() == padded.tolist()


def test_history_continues_in_the_same_stream():
    order = StridedOrder()
    stream = order.indices(100, 5, 1)
    after = np.stack([order.indices(100, 5, 1, r, 3, history=[(8, 4), (5, 2)]) for r in range(3)], axis=1)
    np.testing.assert_array_equal(after.ravel()[: 100 - 42], stream[42:])


def test_more_consumed_than_there_is_is_refused():
    with pytest.raises(StateError, match=r"history\[1\] says that each of 2 ranks consumed 3 .* only 2 left"):
        StridedOrder().length(20, history=[(4, 4), (2, 3)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": -1}, "layout must be a number of samples in 0"),
        ({"layout": 1.5}, "layout must be a number of samples in 0"),
        ({"layout": True}, "layout must be a number of samples in 0"),
        ({"layout": [2**62] * 4}, "no more than 9007199254740992 samples in all"),
        ({"layout": [3, -1]}, "one number of samples >= 0 per part"),
        ({"layout": [[3]]}, "one number of samples >= 0 per part"),
        ({"layout": 9, "rank": 2, "world_size": 2}, r"rank must be of 0\.\.1, got 2"),
        ({"layout": 9, "rank": -1}, r"rank must be of 0\.\.0, got -1"),
        ({"layout": 9, "world_size": 0}, "world_size must be >= 1, got 0"),
        ({"layout": 9, "seed": -1}, "seed must be an integer of"),
        ({"layout": 9, "epoch": -1}, "epoch must be >= 0, got -1"),
        ({"layout": 9, "start": -1}, "start and stop must be >= 0"),
        ({"layout": 9, "history": [(0, 1)]}, "history must be pairs"),
        ({"layout": 9, "seed": 2**64 - 1, "epoch": 1}, r"seed \+ epoch must be < 2\*\*64"),
    ],
)
def test_wrong_arguments_are_refused_with_rule_value_and_remedy(arguments, message):
    with pytest.raises(GraphError, match=message):
        StridedOrder().indices(**arguments)
