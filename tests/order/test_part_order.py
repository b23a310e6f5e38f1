"""PartOrder against the recipe run with numpy, and what it does with unequal parts."""

from __future__ import annotations

import numpy as np
import pytest

from pipegraph.errors import GraphError
from pipegraph.order import PartOrder


@pytest.mark.parametrize("seed", [0, 7, 12345, 2**32 - 1])
@pytest.mark.parametrize("trainer_num", [1, 3, 16, 1_000])
def test_the_parts_are_those_of_the_recipe(seed, trainer_num):
    files = list(range(16_000))
    np.random.RandomState(seed).shuffle(files)
    for trainer_id in {0, trainer_num // 2, trainer_num - 1}:
        recipe = [part for index, part in enumerate(files) if index % trainer_num == trainer_id]
        ours = PartOrder().parts(16_000, seed=seed, epoch=0, rank=trainer_id, world_size=trainer_num)
        assert ours.tolist() == recipe


def test_samples_are_those_of_the_parts_one_after_the_other_permuted_within():
    sizes = np.array([40, 7, 0, 90, 1, 33])
    starts = np.cumsum(sizes) - sizes
    order = PartOrder(tail="uneven")
    for rank in range(2):
        expected = [
            starts[part] + order.within(int(part), int(sizes[part]), 3, 1)
            for part in order.parts(6, 3, 1, rank, 2)
        ]
        assert order.indices(sizes, 3, 1, rank, 2).tolist() == np.concatenate(expected).tolist()
    within = order.within(3, 90, 3, 1)
    assert sorted(within.tolist()) == list(range(90))
    assert within.tolist() != list(range(90))
    assert order.within(3, 90, 3, 1, 10, 20).tolist() == within[10:20].tolist()
    assert order.within(3, 90, 3, 1, 85, 200).tolist() == within[85:].tolist()


def test_without_shuffle_parts_and_samples_come_in_their_own_order():
    order = PartOrder(shuffle=False, tail="uneven")
    assert order.parts(7, 3, 1, 1, 3).tolist() == [1, 4]
    assert order.indices([2, 3, 2, 1], 3, 1, 1, 2).tolist() == [2, 3, 4, 7]
    assert order.within(1, 3).tolist() == [0, 1, 2]


def test_unequal_parts_are_padded_dropped_or_left_uneven():
    sizes = [10, 4, 10, 4]
    padded, dropped, uneven = (PartOrder(shuffle=False, tail=tail) for tail in ("pad", "drop", "uneven"))
    assert [padded.length(sizes, 2), dropped.length(sizes, 2)] == [20, 8]
    assert [uneven.length(sizes, 2, rank=rank) for rank in (0, 1)] == [20, 8]
    short = padded.indices(sizes, rank=1, world_size=2).tolist()
    own = [10, 11, 12, 13, 24, 25, 26, 27]
    assert short == (own * 3)[:20]
    assert (padded.positions(sizes, rank=1, world_size=2)[8:] >= 28).all()


def test_a_resize_splits_begun_parts_and_deals_the_others_again():
    order = PartOrder(shuffle=False, tail="uneven")
    sizes = [10] * 8
    # Two ranks read parts 0, 2, 4, 6 and 1, 3, 5, 7; after 14 steps parts 2 and 3 are begun.
    after = [order.indices(sizes, rank=r, world_size=3, history=[(2, 14)]).tolist() for r in range(3)]
    begun = [after[0][:4], after[1][:4], after[2][:4]]
    assert begun == [[24, 25, 26, 27], [28, 29, 34, 35], [36, 37, 38, 39]]
    assert after[0][4:] == [*range(40, 50), *range(70, 80)]
    assert after[1][4:] == [*range(50, 60)]
    assert after[2][4:] == [*range(60, 70)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PartOrder(tail="cut"), "PartOrder: tail must be one of 'pad', 'drop', 'uneven', got 'cut'"),  # type: ignore[arg-type]
        (lambda: PartOrder().parts(-1), "a number of parts >= 0, got -1"),
        (lambda: PartOrder().parts(4, rank=4, world_size=4), r"rank must be of 0\.\.3, got 4"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(GraphError, match=message):
        call()


def test_padded_places_of_ranks_with_fewer_parts_are_distinct():
    order = PartOrder(shuffle=False)
    sizes = np.array([10, 2])
    length = order.length(sizes, world_size=4)
    read = [order.positions(sizes, rank=rank, world_size=4) for rank in range(4)]
    assert length == 10
    assert len(np.unique(np.concatenate(read))) == 4 * length
