"""How close an order comes to a global shuffle: distinct parts per batch, and how far class-sorted batches stray.

Prints the measures of the built-in orders on parts of equal size; call the functions for an order of your own.

    python benchmarks/shuffle_quality.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tables import table

from pipegraph.order import LaneOrder, PartOrder, StridedOrder

PARTS, SAMPLES, BATCH, CLASSES = 1000, 320, 32, 100
DRIFT_BATCHES = 32
"""Consecutive batches over which drift is measured."""


def distinct_parts(epoch: Any, part_samples: Any, batch: int) -> float:
    """Distinct parts in a full batch, on average; ``epoch`` is an order as ``Order.indices`` gives it."""
    parts = np.searchsorted(np.cumsum(part_samples), batches(epoch, batch), side="right")
    parts.sort(axis=1)
    return float((np.diff(parts, axis=1) > 0).sum(axis=1).mean()) + 1


def variance_inflation(value: Any, epoch: Any, batch: int) -> float:
    """Variance of batch means over that of batches drawn without replacement; ``value`` is a number for each sample.

    One whole part of class-sorted data gives about 1 + (b-1) rho, a pool of K parts about 1 + (b-1) rho / K, with rho
    the correlation of two samples of a part.
    """
    means, total = value[batches(epoch, batch)].mean(axis=1), len(value)
    expected = value.var() / batch * (total - batch) / (total - 1)
    return float(((means - value.mean()) ** 2).mean() / expected)


def batches(epoch: Any, batch: int) -> Any:
    """Full batches, int64 (batches, batch); a last smaller one is left out."""
    return epoch[: len(epoch) // batch * batch].reshape(-1, batch)


def main() -> None:
    parts = np.full(PARTS, SAMPLES, np.int64)
    total = PARTS * SAMPLES
    label = (np.arange(total) * CLASSES // total).astype(np.float64)
    built_in = (LaneOrder(), LaneOrder(lanes=32), PartOrder(), StridedOrder(shuffle=True))
    orders = {str(order): order.indices(parts, 1, 0) for order in built_in}
    orders["a global shuffle"] = np.random.default_rng(0).permutation(total)
    rows = []
    for name, epoch in orders.items():
        inflation = [variance_inflation(label, epoch, n * BATCH) for n in (1, DRIFT_BATCHES)]
        measures = [distinct_parts(epoch, parts, BATCH), *inflation]
        rows.append([name, *(f"{value:.2f}" for value in measures)])
    print(table(["", "distinct parts", "variance of batch means", f"of {DRIFT_BATCHES} batches"], rows))


if __name__ == "__main__":
    main()
