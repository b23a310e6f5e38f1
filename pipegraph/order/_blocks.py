"""A table that finds a position among the blocks of an epoch."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import numpy.typing as npt

from pipegraph.order._cache import BoundedMemo
from pipegraph.order.layout import Int64Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Fixed:
    """What all epochs of a layout share.

    Attributes:
        samples: of each block, in four bytes where they fit: the epoch's gather jumps about in half the memory.
        first_sample: of each block, int64.
    """

    samples: npt.NDArray[np.integer]
    first_sample: Int64Array

    @staticmethod
    def of(samples: Int64Array) -> _Fixed:
        first_sample = np.cumsum(samples)
        first_sample -= samples
        fits = not len(samples) or int(samples.max()) < 2**31
        return _Fixed(samples.astype(np.int32) if fits else samples, first_sample)


_fixed: BoundedMemo[_Fixed] = BoundedMemo(32 << 20, lambda f: f.samples.nbytes + f.first_sample.nbytes)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPlaces:
    """A stream of permuted blocks. Places are numbered through the stream.

    Attributes:
        order: the block's number in the manifest, int64 (blocks,).
        ends: the place behind each block, int64 (blocks,).
        first_sample: the first sample of each block of the manifest, in its order, int64 (blocks,).
    """

    order: Int64Array
    ends: Int64Array
    first_sample: Int64Array

    @classmethod
    def of(cls, samples: Int64Array, order: Int64Array, digest: str | None = None) -> BlockPlaces:
        """The table of blocks with these numbers of samples, in this order.

        Args:
            digest: of the layout: what no epoch changes is then made once for all of them.
        """
        make = partial(_Fixed.of, samples)
        fixed = make() if digest is None else _fixed.get((digest, len(samples)), make)
        # In place: with millions of blocks, fresh pages cost as much as the sums.
        ends = np.take(fixed.samples, order).astype(np.int64, copy=False)
        np.cumsum(ends, out=ends)
        return cls(order, ends, fixed.first_sample)

    @property
    def nbytes(self) -> int:
        """Of this epoch's own arrays."""
        return self.order.nbytes + self.ends.nbytes

    def find(self, places: Int64Array) -> Int64Array:
        """The blocks, as numbers in the stream, that hold these places."""
        return np.searchsorted(self.ends, places, side="right")

    def starts(self, blocks: Int64Array) -> Int64Array:
        """The first place of each block given by its number in the stream."""
        return np.where(blocks > 0, self.ends[blocks - 1], 0)

    def samples(self, places: Int64Array, blocks: Int64Array) -> Int64Array:
        """The samples at places of the blocks given by their numbers in the stream."""
        return self.first_sample[self.order[blocks]] + (places - self.starts(blocks))
