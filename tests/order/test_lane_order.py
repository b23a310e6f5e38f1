"""LaneOrder: the exact mapping, windows, rotation, and manifests with blocks."""

from __future__ import annotations

import numpy as np
import pytest

from pipegraph.errors import GraphError
from pipegraph.order import LaneOrder
from pipegraph.order.lane_order import LanedEpoch


def epoch_of(samples, lanes, window=1, seed=3, epoch=0):
    return LanedEpoch.of(np.asarray(samples), lanes, window, seed, epoch)


def test_lanes_are_equal_and_position_k_is_lane_k_mod_l_at_offset_k_div_l():
    laned = epoch_of([100] * 10, lanes=7)
    assert np.diff(laned.bounds).tolist() == [143] * 6 + [142]
    drawn = laned.samples(np.arange(1_000))
    stream_block = np.argsort(laned.table.order)[drawn // 100]
    for lane in range(7):
        lowest, highest = laned.bounds[lane] // 100, (laned.bounds[lane + 1] - 1) // 100
        assert set(stream_block[lane::7].tolist()) == set(range(lowest, highest + 1))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_samples_stay_within_their_window_of_blocks_and_are_permuted_in_it(window):
    samples = [60] * 40
    laned = epoch_of(samples, lanes=4, window=window)
    drawn = laned.samples(np.arange(2_400))
    stream_block = np.argsort(laned.table.order)[drawn // 60]
    for lane in range(4):
        # A lane is ten whole blocks; undo its rotation, then each window is a permutation of itself.
        unrotated = np.roll(drawn[lane::4], laned.rotation[lane])
        blocks = np.roll(stream_block[lane::4], laned.rotation[lane])
        for first in range(0, 10, window):
            piece = slice(first * 60, min(first + window, 10) * 60)
            expected = range(lane * 10 + first, lane * 10 + min(first + window, 10))
            assert set(blocks[piece].tolist()) == set(expected)
            assert len(set(unrotated[piece].tolist())) == len(unrotated[piece])
            assert unrotated[piece].tolist() != sorted(unrotated[piece].tolist())


def test_rotation_spreads_block_switches_in_time():
    drawn = epoch_of([1_000] * 480, lanes=240).samples(np.arange(240 * 1_000)) // 1_000
    by_lane = drawn.reshape(1_000, 240)
    switches = (by_lane[1:] != by_lane[:-1]).sum(axis=1)
    # 240 lanes switch once in 999 steps; together they would do it in one step.
    assert switches.sum() >= 230
    assert switches.max() <= 5


def test_without_shuffle_samples_come_in_manifest_order():
    assert LaneOrder(shuffle=False).indices([4, 0, 3], 1, 1, 1, 2).tolist() == [1, 3, 5, 0]


def test_tails_pad_drop_or_stay_uneven():
    assert [LaneOrder(tail=tail).length([5, 5, 1], 4) for tail in ("pad", "drop", "uneven")] == [3, 2, 3]
    assert [LaneOrder(tail="uneven").length([5, 5, 1], 4, rank=r) for r in range(4)] == [3, 3, 3, 2]
    assert LaneOrder(tail="uneven").length([5, 5, 1], 4, [(4, 2)], rank=3) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lanes": 0}, "lanes must be an int >= 1, got 0"),
        ({"lanes": 2.0}, r"lanes must be an int >= 1, got 2\.0"),
        ({"window": True}, "window must be an int >= 1, got True"),
        ({"tail": "cut"}, "tail must be one of 'pad', 'drop', 'uneven', got 'cut'"),
    ],
)
def test_wrong_parameters_are_refused(arguments, message):
    with pytest.raises(GraphError, match=message):
        LaneOrder(**arguments)


def test_the_order_never_changes():
    assert LaneOrder(lanes=2).indices([3, 4, 5], seed=7, epoch=1).tolist() == [
        9,
        4,
        7,
        6,
        11,
        5,
        10,
        0,
        3,
        1,
        8,
        2,
    ]
