"""What an order needs to know of the data: the number of samples per block."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from pipegraph.errors import GraphError, shown

if TYPE_CHECKING:
    import numpy.typing as npt

Int64Array: TypeAlias = "npt.NDArray[np.int64]"


@runtime_checkable
class ManifestLike(Protocol):
    """The part of a manifest that an order reads. Arrays are not to be changed.

    Samples are numbered through all parts in manifest order, and blocks through
    all parts likewise: the blocks of part 0, then those of part 1, and so on.
    """

    @property
    def part_samples(self) -> Int64Array:
        """Samples of each part, int64 (parts,)."""
        ...

    @property
    def block_samples(self) -> Int64Array:
        """Samples of each block, int64 (blocks,); sums to the same number."""
        ...

    @property
    def digest(self) -> str:
        """Equal for two manifests exactly if they list the same data."""
        ...


MAX_SAMPLES = 1 << 53
"""More than any dataset has: sums of larger counts, which only damaged or forged data has, might not fit int64."""

LayoutLike: TypeAlias = "int | Sequence[int] | npt.NDArray[np.integer] | ManifestLike"


def total_samples(layout: LayoutLike) -> int:
    """The samples of a layout.

    Raises:
        GraphError: a number of samples is negative or not an integer.
    """
    return layout if type(layout) is int and 0 <= layout <= MAX_SAMPLES else int(part_samples(layout).sum())


def part_samples(layout: LayoutLike) -> Int64Array:
    """Samples of each part, int64 (parts,); a plain number is one part.

    Raises:
        GraphError: a number of samples is negative or not an integer.
    """
    if isinstance(layout, ManifestLike):
        return layout.part_samples
    if isinstance(layout, Sequence) or (isinstance(layout, np.ndarray) and layout.ndim):
        return _samples_array(layout)
    return np.array([_count(layout)], dtype=np.int64)


def block_samples(layout: LayoutLike) -> Int64Array:
    """Samples of each block, int64 (blocks,); without blocks the parts are blocks."""
    return layout.block_samples if isinstance(layout, ManifestLike) else part_samples(layout)


def _count(value: object) -> int:
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count <= MAX_SAMPLES or isinstance(value, bool):
        raise GraphError(
            f"layout must be a number of samples in 0..{MAX_SAMPLES}, the samples per part, or a manifest, "
            f"got {shown(value)}. Pass len(dataset), a list of counts, or the manifest that `pipegraph index` wrote."
        )
    return count


def _samples_array(values: Sequence[int] | npt.NDArray[np.integer]) -> Int64Array:
    array = np.asarray(values) if len(values) else np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and int(array.min()) < 0):
        raise GraphError(
            "layout must list one number of samples >= 0 per part, "
            f"got {array.dtype} of shape {array.shape}. Pass a flat list or int64 array."
        )
    if array.sum(dtype=np.float64) > MAX_SAMPLES:
        raise GraphError(
            f"layout must list no more than {MAX_SAMPLES} samples in all, got {array.max()} in one part"
        )
    return array.astype(np.int64, copy=False)


def layout_digest(layout: LayoutLike) -> str:
    """Identifies a layout: a manifest's digest, else the counts' own."""
    if isinstance(layout, ManifestLike):
        return layout.digest
    counts = part_samples(layout)
    return f"samples:{blake2b(counts.astype('<i8').tobytes(), digest_size=16).hexdigest()}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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
