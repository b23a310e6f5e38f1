"""Drift: how far the mean over many consecutive batches strays, of data sorted by class."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.shuffle_quality import DRIFT_BATCHES, variance_inflation
from pipegraph.order import LaneOrder, PartOrder, StridedOrder
from pipegraph.order._spread import spread

BATCH, CLASSES = 512, 1_000


def layout_of(blocks, samples, unequal):
    rng = np.random.default_rng(1)
    return rng.integers(samples // 2, samples * 3 // 2, blocks) if unequal else np.full(blocks, samples)


def drift(order, layout, batch=BATCH):
    total = int(layout.sum())
    label = (np.arange(total) * CLASSES // total).astype(np.float64)
    epochs = [order.indices(layout, 1, epoch) for epoch in range(3)]
    return np.mean([variance_inflation(label, epoch, DRIFT_BATCHES * batch) for epoch in epochs])


@pytest.mark.parametrize("unequal", [False, True], ids=["equal blocks", "unequal blocks"])
@pytest.mark.parametrize(("blocks", "samples"), [(16_000, 40), (8_000, 80), (2_000, 80), (1_000, 320)])
def test_the_default_order_of_data_sorted_by_class_drifts_at_most_8_times_as_a_global_shuffle(
    blocks, samples, unequal
):
    assert drift(LaneOrder(), layout_of(blocks, samples, unequal)) <= 8


def test_the_measure_tells_a_global_shuffle_from_parts_read_one_after_the_other():
    layout = layout_of(2_000, 80, False)
    assert drift(StridedOrder(), layout) == pytest.approx(1, abs=0.6)
    assert drift(PartOrder(), layout) > 50


def test_over_an_epoch_each_lane_reads_from_all_over_the_data():
    samples, lanes = np.full(3_840, 10), 24
    lists = spread(samples, lanes, 3, 1).reshape(lanes, -1)
    assert (np.ptp(lists, axis=1) > 0.9 * 3_840).all()
