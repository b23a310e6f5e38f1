"""What holds for every order, at any sizes: shares, steps, epochs, resizes, pieces."""

from __future__ import annotations

import json
import os
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipegraph.errors import GraphError
from pipegraph.order import BlockOrder, LaneOrder, Order, PartOrder, StridedOrder

ORDERS: list[Order] = [
    StridedOrder(),
    StridedOrder(shuffle=False),
    StridedOrder(drop_last=True),
    BlockOrder(),
    BlockOrder(shuffle=False),
    BlockOrder(allow_duplicates=False),
    BlockOrder(shuffle=False, allow_duplicates=False),
    BlockOrder(compat=True),
    BlockOrder(compat=True, allow_duplicates=False),
    PartOrder(),
    PartOrder(shuffle=False),
    PartOrder(tail="drop"),
    PartOrder(tail="uneven"),
    LaneOrder(),
    LaneOrder(lanes=5, window=3),
    LaneOrder(shuffle=False),
    LaneOrder(lanes=7, tail="drop"),
    LaneOrder(lanes=3, window=2, tail="uneven"),
]
SHUFFLED = [order for order in ORDERS if getattr(order, "shuffle")]  # noqa: B009
EXAMPLES = int(os.environ.get("PIPEGRAPH_FUZZ_EXAMPLES", "300")) // 20
"""Of what takes long, for each order."""
LAYOUTS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def pads(order: Order) -> bool:
    return order.tail == "pad"


def is_uneven(order: Order) -> bool:
    return order.tail == "uneven"


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@settings(max_examples=40)
@given(
    layout=LAYOUTS, world_size=st.integers(1, 12), seed=st.integers(0, 2**64 - 10), epoch=st.integers(0, 5)
)
def test_ranks_share_the_epoch_exclusively_completely_and_in_equal_steps(
    order, layout, world_size, seed, epoch
):
    total = sum(layout)
    positions = [order.positions(layout, seed, epoch, r, world_size) for r in range(world_size)]
    indices = [order.indices(layout, seed, epoch, r, world_size) for r in range(world_size)]
    lengths = [order.length(layout, world_size, (), r, seed, epoch) for r in range(world_size)]
    assert [len(p) for p in positions] == lengths
    if not is_uneven(order):
        assert len(set(lengths)) == 1
    every = np.concatenate(positions)
    assert len(np.unique(every)) == len(every)
    real = every < total
    samples = np.concatenate(indices)
    assert len(np.unique(samples[real])) == real.sum()
    if not getattr(order, "compat", False):
        assert ((samples >= 0) & (samples < total)).all()
    if pads(order) or is_uneven(order):
        assert np.array_equal(np.sort(samples[real]), np.arange(total))
        assert pads(order) or real.all()
    else:
        assert real.all()
        if not isinstance(order, PartOrder):
            assert total - len(every) < world_size


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_padded_places_have_the_data_of_their_position_modulo_n(order):
    layout, world_size = [7, 3, 0, 11, 2], 9
    for rank in range(world_size):
        positions = order.positions(layout, 3, 1, rank, world_size)
        expected = order.samples_at(layout, positions % 23, 3, 1)
        assert order.indices(layout, 3, 1, rank, world_size).tolist() == expected.tolist()


@pytest.mark.parametrize("order", SHUFFLED, ids=repr)
def test_another_epoch_and_another_seed_have_another_order(order):
    layout = [50] * 20
    first = order.indices(layout, 0, 0, 1, 3).tolist()
    assert first == order.indices(layout, 0, 0, 1, 3).tolist()
    assert first != order.indices(layout, 0, 1, 1, 3).tolist()
    if not getattr(order, "compat", False):
        assert first != order.indices(layout, 1, 0, 1, 3).tolist()
    if not getattr(order, "compat", False) and not isinstance(order, StridedOrder):
        assert order.indices(layout, 0, 1, 1, 3).tolist() != order.indices(layout, 1, 0, 1, 3).tolist()


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@settings(max_examples=25)
@given(layout=LAYOUTS, world_size=st.integers(1, 9), piece=st.integers(1, 50), consumed=st.integers(0, 60))
def test_pieces_drawn_one_by_one_are_the_whole(order, layout, world_size, piece, consumed):
    history = [(4, min(consumed, order.length(layout, 4, seed=5)))]
    for rank in {0, world_size - 1}:
        whole = order.indices(layout, 5, 0, rank, world_size, history=history)
        pieces = [
            order.indices(layout, 5, 0, rank, world_size, start, start + piece, history)
            for start in range(0, len(whole) + 1, piece)
        ]
        assert np.array_equal(np.concatenate(pieces), whole)
        assert order.indices(layout, 5, 0, rank, world_size, len(whole), None, history).size == 0


def run_resized(order, layout, seed, epoch, sizes, draw):
    """Positions and samples that ranks see who are resized at random points, and the stops."""
    history: list[tuple[int, int]] = []
    seen: list[np.ndarray] = []
    for world_size in sizes:
        lengths = [order.length(layout, world_size, history, r, seed, epoch) for r in range(world_size)]
        last = world_size == sizes[-1]
        steps = max(lengths) if last else draw.randint(0, max(lengths) // 2)
        seen += [
            order.positions(layout, seed, epoch, r, world_size, 0, steps, history) for r in range(world_size)
        ]
        history.append((world_size, steps))
    return np.concatenate(seen), history


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@settings(max_examples=EXAMPLES)
@given(
    layout=st.one_of(LAYOUTS, st.lists(st.integers(20, 90), min_size=20, max_size=40)),
    seed=st.integers(0, 2**32),
    points=st.randoms(use_true_random=False),
)
def test_a_run_resized_at_random_points_sees_every_sample_exactly_once(order, layout, seed, points):
    total = sum(layout)
    seen, history = run_resized(order, layout, seed, 2, [8, 6, 5, 16, 7, 1], points)
    real = seen[seen < total]
    assert len(np.unique(real)) == len(real)
    first_list = total
    if getattr(order, "allow_duplicates", True) is False:
        first_list = total // 8 * 8  # the list dealt at the first world size is kept
    assert len(real) == first_list
    samples = order.samples_at(layout, np.sort(real), seed, 2) if total else real
    assert len(np.unique(samples)) == first_list
    assert order.length(layout, 4, history, 0, seed, 2) == 0


@pytest.mark.parametrize("order", [o for o in ORDERS if isinstance(o, (StridedOrder, LaneOrder))], ids=repr)
def test_global_batches_are_the_same_at_any_world_sizes(order):
    draw = random.Random(4)
    layout = [37, 60, 5, 0, 41, 90] * 10
    stream = order.indices(layout, 9, 3)
    history: list[tuple[int, int]] = []
    joined: list[int] = []
    for world_size in (8, 6, 5, 16, 7, 1):
        steps = draw.randint(1, 40)
        ranks = [order.indices(layout, 9, 3, r, world_size, 0, steps, history) for r in range(world_size)]
        joined += np.stack(ranks, axis=1).ravel().tolist()
        history.append((world_size, steps))
    assert joined == stream[: len(joined)].tolist()


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_an_empty_set_is_an_empty_epoch_and_has_no_samples(order):
    for layout in (0, [], [0, 0]):
        assert order.length(layout, 3) == 0
        assert order.indices(layout, rank=2, world_size=3).size == 0
    with pytest.raises(GraphError, match="position 7 of a layout without samples"):
        order.samples_at(0, np.array([7]))


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_orders_are_hashable_values_whose_config_is_json_and_makes_them_again(order):
    config = json.loads(json.dumps(order.config()))
    assert config.pop("order") == type(order).__name__
    config.pop("blocks", None)  # how LaneOrder permutes them: no parameter, but part of the order
    again = type(order)(**config)
    assert again == order
    assert hash(again) == hash(order)
    assert repr(order).startswith(type(order).__name__ + "(")


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@settings(max_examples=12)
@given(
    layout=LAYOUTS,
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    draw=st.randoms(use_true_random=False),
)
def test_what_ranks_consumed_unequally_and_with_holes_is_left_out_and_the_rest_comes_once(
    order, layout, sizes, draw
):
    total, seen, history = sum(layout), Counter(), []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        consumed = []
        for rank in range(size):
            positions = order.positions(layout, 3, 1, rank, size, history=history).tolist()
            count = len(positions) if last else draw.randint(0, len(positions))
            beyond = [step for step in range(count, min(count + 9, len(positions))) if draw.random() < 0.4]
            seen.update(p for p in [*positions[:count], *(positions[step] for step in beyond)] if p < total)
            consumed.append([count, f"{sum(1 << step - count for step in beyond):x}"] if beyond else count)
        history = [*history, [size, consumed]]
    assert not seen or max(seen.values()) == 1
    if pads(order) or is_uneven(order):
        assert len(seen) == total
    json.dumps(history)
