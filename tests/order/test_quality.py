"""The measures of shuffle quality, and what they say of the orders."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.shuffle_quality import (
    displacement,
    expected_displacement,
    expected_parts_per_batch,
    met_again,
    parts_per_batch,
    quality,
    variance_inflation,
)
from pipegraph.errors import GraphError
from pipegraph.order import LaneOrder, PartOrder, StridedOrder

PARTS, SAMPLES = 1_000, 320
LAYOUT = [SAMPLES] * PARTS
TOTAL = PARTS * SAMPLES


def alike_within_parts(rho):
    """A value of variance 1 whose correlation within a part is rho."""
    rng = np.random.default_rng(3)
    of_part = np.repeat(rng.standard_normal(PARTS), SAMPLES)
    return np.sqrt(rho) * of_part + np.sqrt(1 - rho) * rng.standard_normal(TOTAL)


def test_blocks_pooled_from_many_parts_come_near_a_global_shuffle():
    value = alike_within_parts(0.05)
    measured = {
        name: variance_inflation(value, order.indices(LAYOUT, 1, 0), 32)
        for name, order in {
            "global": StridedOrder(),
            "a part": PartOrder(),
            "20 parts pooled": LaneOrder(lanes=1, window=20),
            "16 lanes": LaneOrder(lanes=16),
            "32 lanes": LaneOrder(lanes=32),
        }.items()
    }
    # 1 + (b - 1) rho / K, with b = 32: 2.55 for K = 1, 1.08 for K = 20.
    assert measured["global"] == pytest.approx(1, abs=0.06)
    assert measured["a part"] == pytest.approx(2.55, abs=0.25)
    assert measured["20 parts pooled"] == pytest.approx(1.08, abs=0.1)
    assert measured["16 lanes"] == pytest.approx(1.05, abs=0.1)
    assert measured["32 lanes"] == pytest.approx(1, abs=0.06)


def test_distinct_parts_per_batch_meet_their_expectation_under_a_global_shuffle():
    sizes = np.array([10, 500, 90, 0, 400, 1_000] * 20)
    drawn = parts_per_batch(StridedOrder().indices(sizes, 2, 0), sizes, 64)
    assert drawn.mean() == pytest.approx(expected_parts_per_batch(sizes, 64), rel=0.02)
    assert parts_per_batch(np.arange(20), np.array([8, 12]), 4).tolist() == [1, 1, 1, 1, 1]
    assert parts_per_batch(np.arange(20), np.array([7, 13]), 4).tolist() == [1, 2, 1, 1, 1]
    # A part so large that no batch misses it counts as always met.
    assert expected_parts_per_batch(np.array([19, 1]), 10) == pytest.approx(1.5)


def test_displacement_meets_its_expectation_under_a_global_shuffle():
    quantiles = np.array([0.1, 0.5, 0.9])
    moved = displacement(StridedOrder().indices(50_000, 2, 0), 50_000)
    assert np.quantile(moved, quantiles) == pytest.approx(expected_displacement(quantiles), abs=0.01)
    assert displacement(np.arange(10), 10).max() == 0


def test_samples_meet_again_as_often_as_by_chance_only_where_they_are_mixed_anew():
    def shares(order):
        epochs = [order.indices([50] * 80, 1, epoch) for epoch in (0, 1)]
        return met_again(*epochs, 20, 4_000)

    measured, chance = shares(StridedOrder())
    assert chance == pytest.approx(19 / 3_999)
    assert measured == pytest.approx(chance, rel=0.15)
    assert shares(PartOrder())[0] > 20 * chance
    assert shares(LaneOrder(lanes=20))[0] < 3 * chance
    assert met_again(np.arange(40), np.arange(40), 4, 40)[0] == 1
    assert met_again(np.arange(40), np.arange(40).reshape(10, 4).T.ravel(), 4, 40)[0] == pytest.approx(
        0, abs=0.1
    )


def test_all_measures_come_together_beside_their_expectations():
    order = LaneOrder(lanes=32)
    epochs = [order.indices(LAYOUT, 1, epoch) for epoch in (0, 1)]
    measured = quality(epochs[0], np.array(LAYOUT), 32, classes=100, following=epochs[1])
    assert measured.parts_per_batch == pytest.approx(measured.parts_expected, rel=0.05)
    assert measured.inflation < 1.1
    assert measured.displacement == pytest.approx(measured.displacement_expected, abs=0.1)
    text = str(measured)
    assert "distinct parts per batch" in text
    assert "global shuffle" in text
    alone = quality(epochs[0], np.array(LAYOUT), 32, classes=100)
    assert np.isnan(alone.met_again)


@pytest.mark.parametrize("batch", [0, 21])
def test_a_batch_that_the_epoch_cannot_fill_is_refused(batch):
    with pytest.raises(GraphError, match=rf"batch must be of 1\.\.20, the samples of the epoch, got {batch}"):
        parts_per_batch(np.arange(20), np.array([20]), batch)
    with pytest.raises(GraphError, match="at most the samples there are, 20, got 21"):
        expected_parts_per_batch(np.array([20]), 21)
