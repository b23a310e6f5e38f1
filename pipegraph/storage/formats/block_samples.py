"""Random access to the samples of a block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Row = TypeVar("Row")


class BlockSamples(Sequence[Row]):
    """The samples of one block, each made when it is asked for. A format says how many, and how one is made."""

    nbytes: int = -1
    """What it holds in memory beside the file; -1 where that is what its format says."""

    @abstractmethod
    def sample(self, index: int) -> Row:
        """One sample, 0 <= ``index`` < ``len``.

        Raises:
            ShardError: it is broken; names file and place.
        """

    def run(self, start: int, stop: int) -> list[Row]:
        """Samples that lie one behind the other, at least one; in one read where a format can."""
        return [self.sample(index) for index in range(start, stop)]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        count = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(count)
            if step == 1 and start < stop:
                return self.run(start, stop)
            return [self.sample(each) for each in range(start, stop, step)]
        if not -count <= index < count:
            raise IndexError(f"block of {count} samples has no sample {index}")
        return self.sample(index % count)
