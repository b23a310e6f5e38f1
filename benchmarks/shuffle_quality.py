"""How close an order comes to a global shuffle: distinct parts per batch, and how far class-sorted batches stray.

Prints the measures of the built-in orders on parts of equal size; call the functions for an order of your own.

    python benchmarks/shuffle_quality.py --parts 1000 --samples 320 --batch 32 --classes 100
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

from pipegraph.order import LaneOrder, PartOrder, StridedOrder

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

DRIFT_BATCHES = 32
"""Consecutive batches over which drift is measured."""


def distinct_parts(epoch: Int64Array, part_samples: Int64Array, batch: int) -> float:
    """Distinct parts in a full batch, on average.

    Args:
        epoch: samples in the order they are read, int64 (samples,), as ``Order.indices`` gives them.
        part_samples: samples of each part, int64 (parts,).
    """
    parts = np.searchsorted(np.cumsum(part_samples), _batches(epoch, batch), side="right")
    parts.sort(axis=1)
    return float((np.diff(parts, axis=1) > 0).sum(axis=1).mean()) + 1


def variance_inflation(value: FloatArray, epoch: Int64Array, batch: int) -> float:
    """Variance of batch means over that of batches drawn without replacement.

    One whole part of class-sorted data gives about 1 + (b-1) rho, a pool of K parts
    about 1 + (b-1) rho / K, with rho the correlation of two samples of a part.

    Args:
        value: a number for each sample, float64 (samples,).
    """
    means = value[_batches(epoch, batch)].mean(axis=1)
    total = len(value)
    expected = value.var() / batch * (total - batch) / (total - 1)
    return float(((means - value.mean()) ** 2).mean() / expected)


def _batches(epoch: Int64Array, batch: int) -> Int64Array:
    """Full batches, int64 (batches, batch); a last smaller one is left out."""
    return epoch[: len(epoch) // batch * batch].reshape(-1, batch)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--parts", type=int, default=1000)
    asked.add_argument("--samples", type=int, default=320, help="samples of each part")
    asked.add_argument("--batch", type=int, default=32)
    asked.add_argument("--classes", type=int, default=100, help="by which the data is taken to be sorted")
    options = asked.parse_args()
    parts = np.full(options.parts, options.samples, np.int64)
    total = int(parts.sum())
    label = (np.arange(total) * options.classes // total).astype(np.float64)
    orders = {
        str(order): order.indices(parts, 1, 0)
        for order in (LaneOrder(), LaneOrder(lanes=32), PartOrder(), StridedOrder(shuffle=True))
    }
    orders["a global shuffle"] = np.random.default_rng(0).permutation(total)
    print(f"{'':58} distinct parts   variance of batch means, of {DRIFT_BATCHES} batches")
    for name, epoch in orders.items():
        distinct = distinct_parts(epoch, parts, options.batch)
        one, many = (variance_inflation(label, epoch, n * options.batch) for n in (1, DRIFT_BATCHES))
        print(f"{name:58} {distinct:14.2f} {one:25.2f} {many:14.2f}")


if __name__ == "__main__":
    main()
