"""Blocks in the epoch's order, laid end to end: the table that finds a place in them."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipegraph.order.layout import Int64Array


@dataclasses.dataclass(frozen=True, eq=False)
class BlockTable:
    """A stream of permuted blocks. Places are numbered through the stream.

    Attributes:
        order: the block's number in the manifest, int64 (blocks,).
        ends: the place behind each block, int64 (blocks,).
        shift: what turns a place of the block into a sample's number, int64 (blocks,).
    """

    order: Int64Array
    ends: Int64Array
    shift: Int64Array

    @classmethod
    def of(cls, samples: Int64Array, order: Int64Array) -> BlockTable:
        """The table of blocks with these numbers of samples, in this order."""
        first_sample = np.cumsum(samples) - samples
        sizes = samples[order]
        ends = np.cumsum(sizes)
        return cls(order, ends, first_sample[order] - (ends - sizes))

    @property
    def nbytes(self) -> int:
        return self.order.nbytes + self.ends.nbytes + self.shift.nbytes

    def find(self, places: Int64Array) -> Int64Array:
        """The blocks, as numbers in the stream, that hold these places."""
        return np.searchsorted(self.ends, places, side="right")

    def starts(self, blocks: Int64Array) -> Int64Array:
        """The first place of each block given by its number in the stream."""
        return np.where(blocks > 0, self.ends[blocks - 1], 0)
