"""A table that finds a position among the blocks of an epoch."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipegraph.order.layout import Int64Array


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
    def of(cls, samples: Int64Array, order: Int64Array) -> BlockPlaces:
        """The table of blocks with these numbers of samples, in this order."""
        return cls(order, np.cumsum(samples[order]), np.cumsum(samples) - samples)

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return self.order.nbytes + self.ends.nbytes + self.first_sample.nbytes

    def find(self, places: Int64Array) -> Int64Array:
        """The blocks, as numbers in the stream, that hold these places."""
        return np.searchsorted(self.ends, places, side="right")

    def starts(self, blocks: Int64Array) -> Int64Array:
        """The first place of each block given by its number in the stream."""
        return np.where(blocks > 0, self.ends[blocks - 1], 0)

    def samples(self, places: Int64Array, blocks: Int64Array) -> Int64Array:
        """The samples at places of the blocks given by their numbers in the stream."""
        return self.first_sample[self.order[blocks]] + (places - self.starts(blocks))
