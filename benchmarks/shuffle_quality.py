"""How close an order comes to a global shuffle: measures of one epoch, each with its expected value.

Sample numbers are those of ``Order.indices``: through all parts in manifest order. The script prints the
measures of the built-in orders on parts of equal size; call ``quality`` for an order and parts of your own.

    python benchmarks/shuffle_quality.py --parts 1000 --samples 320 --batch 32 --classes 100
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import numpy as np
import numpy.typing as npt

from pipegraph.errors import GraphError
from pipegraph.order import LaneOrder, PartOrder, StridedOrder

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Quality:
    """The measures of one epoch (and the one after it) beside those of a global shuffle.

    Attributes:
        parts_per_batch, parts_expected: distinct parts in a batch, mean, and the mean that
            a global shuffle has.
        displacement: quantiles 0.1, 0.25, 0.5, 0.75, 0.9 of how far a sample moved from
            its number in the data, over the samples; ``displacement_expected`` likewise.
        met_again, met_expected: of the pairs that shared a batch, the share that shares
            one in the next epoch too; NaN without a next epoch or without pairs.
        inflation: variance of batch means over that of a global shuffle, for a value
            that is constant within a class, classes lying one after the other; NaN where all samples fit one batch.
        drift: the same of the means over ``DRIFT_BATCHES`` consecutive batches; NaN where the epoch has fewer
            than twice as many.
    """

    parts_per_batch: float
    parts_expected: float
    displacement: tuple[float, ...]
    displacement_expected: tuple[float, ...]
    met_again: float
    met_expected: float
    inflation: float
    drift: float

    def __str__(self) -> str:
        def shown(value: float, digits: int) -> str:
            return "-" if math.isnan(value) else f"{value:.{digits}f}"

        unknown = any(map(math.isnan, (self.met_again, self.inflation, self.drift)))
        percent = " ".join(f"{100 * each:.0f}" for each in QUANTILES)
        rows = [
            ("measure", "this order", "global shuffle"),
            ("distinct parts per batch", f"{self.parts_per_batch:.2f}", f"{self.parts_expected:.2f}"),
            (
                f"displacement at {percent} %",
                *map(_quantiles, (self.displacement, self.displacement_expected)),
            ),
            ("pairs of a batch that meet again", shown(self.met_again, 6), shown(self.met_expected, 6)),
            ("variance of batch means, class-sorted", shown(self.inflation, 2), "1.00"),
            (f"the same over {DRIFT_BATCHES} batches", shown(self.drift, 2), "1.00"),
        ]
        lines = [f"{what:<38}{this:>21}{expected:>21}" for what, this, expected in rows]
        return "\n".join([*lines, *["-: too few samples or batches for this measure"] * unknown])


DRIFT_BATCHES = 32
"""Consecutive batches over which drift is measured."""

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def _quantiles(values: tuple[float, ...]) -> str:
    """Shares of the epoch, without their zero: ``.05 .13 .29 .50 .68``."""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def quality(
    epoch: Int64Array, part_samples: Int64Array, batch: int, classes: int, following: Int64Array | None = None
) -> Quality:
    """All measures of an order.

    Args:
        epoch: samples in the order they are read, int64 (samples,): all ranks', or one's.
        part_samples: samples of each part, int64 (parts,).
        batch: samples per batch.
        classes: of how many equal classes, one after the other, the data is taken to consist.
        following: the next epoch, for ``met_again``.

    Raises:
        GraphError: ``batch`` is not within 1..samples of the epoch.
    """
    total = int(part_samples.sum())
    label = (np.arange(total) * classes // max(total, 1)).astype(np.float64)
    again, by_chance = (float("nan"),) * 2 if following is None else met_again(epoch, following, batch, total)
    return Quality(
        parts_per_batch=float(parts_per_batch(epoch, part_samples, batch).mean()),
        parts_expected=expected_parts_per_batch(part_samples, batch),
        displacement=tuple(np.quantile(displacement(epoch, total), QUANTILES).tolist()),
        displacement_expected=tuple(expected_displacement(np.array(QUANTILES)).tolist()),
        met_again=again,
        met_expected=by_chance,
        inflation=variance_inflation(label, epoch, batch),
        drift=variance_inflation(label, epoch, DRIFT_BATCHES * batch)
        if len(epoch) >= 2 * DRIFT_BATCHES * batch
        else float("nan"),
    )


def parts_per_batch(epoch: Int64Array, part_samples: Int64Array, batch: int) -> Int64Array:
    """Distinct parts in each full batch, int64 (batches,)."""
    parts = np.searchsorted(np.cumsum(part_samples), _batches(epoch, batch), side="right")
    parts.sort(axis=1)
    changes: Int64Array = (np.diff(parts, axis=1) > 0).sum(axis=1, dtype=np.int64)
    return changes + 1


def expected_parts_per_batch(part_samples: Int64Array, batch: int) -> float:
    """Their mean under a global shuffle: each part is drawn from unless all draws miss it.

    A part of s of the N samples is missed with the chance C(N-s, b) / C(N, b).
    """
    total = int(part_samples.sum())
    if batch > total:
        raise GraphError(f"batch must be at most the samples there are, {total}, got {batch}")
    # The product over the b draws of the chance to miss, by sums of logarithms. A part so
    # large that it cannot be missed gives log(0), or less, which counts as never missed.
    sizes, parts = np.unique(part_samples, return_counts=True)
    draws = np.arange(batch)
    left = np.maximum(total - sizes[:, None] - draws, 0) / (total - draws)
    with np.errstate(divide="ignore"):
        missed = np.exp(np.log(left).sum(axis=1))
    return float((parts * (1 - missed)).sum())


def displacement(epoch: Int64Array, total: int) -> FloatArray:
    """How far each sample read stands from where it would without shuffling, over ``total``."""
    place = np.arange(len(epoch)) * (total / max(len(epoch), 1))
    moved: FloatArray = np.abs(epoch - place) / total
    return moved


def expected_displacement(quantiles: FloatArray) -> FloatArray:
    """Quantiles of the displacement under a global shuffle: |x - y| of two uniform numbers."""
    expected: FloatArray = 1 - np.sqrt(1 - quantiles)
    return expected


def met_again(epoch: Int64Array, following: Int64Array, batch: int, total: int) -> tuple[float, float]:
    """The share of a batch's pairs that share a batch of the next epoch too, and that by chance.

    Args:
        epoch, following: samples of two epochs, in the order they are read.
    """
    batch_of = np.full(total, -1, dtype=np.int64)
    full = _batches(following, batch)
    batch_of[full.ravel()] = np.repeat(np.arange(len(full)), batch)
    later = np.sort(batch_of[_batches(epoch, batch)], axis=1)
    # The pairs of a run of c equal numbers: each element meets those before it in its run.
    pairs, run = 0, np.zeros(len(later), dtype=np.int64)
    for column in range(1, batch):
        same = (later[:, column] == later[:, column - 1]) & (later[:, column] >= 0)
        run = np.where(same, run + 1, 0)
        pairs += int(run.sum())
    possible = len(later) * batch * (batch - 1) // 2
    by_chance = (batch - 1) / (total - 1) if total > 1 else float("nan")
    return (pairs / possible if possible else float("nan")), by_chance


def variance_inflation(value: FloatArray, epoch: Int64Array, batch: int) -> float:
    """Variance of batch means over that of batches drawn without replacement.

    One whole part of class-sorted data gives about 1 + (b-1) rho, a pool of K parts
    about 1 + (b-1) rho / K, with rho the correlation of two samples of a part.

    Args:
        value: a number for each sample, float64 (samples,).
    """
    means = value[_batches(epoch, batch)].mean(axis=1)
    total = len(value)
    expected = value.var() / batch * (total - batch) / max(total - 1, 1)
    return float(((means - value.mean()) ** 2).mean() / expected) if expected else float("nan")


def _batches(epoch: Int64Array, batch: int) -> Int64Array:
    """Full batches, int64 (batches, batch); a last smaller one is left out."""
    if not 1 <= batch <= len(epoch):
        raise GraphError(f"batch must be of 1..{len(epoch)}, the samples of the epoch, got {batch}")
    return epoch[: len(epoch) // batch * batch].reshape(-1, batch)


def main() -> None:
    """Print a table per order."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--parts", type=int, default=1000)
    asked.add_argument("--samples", type=int, default=320, help="samples of each part")
    asked.add_argument("--batch", type=int, default=32)
    asked.add_argument("--classes", type=int, default=100, help="by which the data is taken to be sorted")
    options = asked.parse_args()
    parts = np.full(options.parts, options.samples, np.int64)
    for order in (LaneOrder(), PartOrder(), StridedOrder(shuffle=True)):
        epochs = [order.indices(parts, 1, epoch) for epoch in (0, 1)]
        print(
            order, quality(epochs[0], parts, options.batch, options.classes, epochs[1]), sep="\n", end="\n\n"
        )


if __name__ == "__main__":
    main()
