"""One item of each input in turn: what ``Merge`` and the data loader's workers share."""

from __future__ import annotations

from collections.abc import Sequence

from pipegraph.chunk import Chunk, Cursor
from pipegraph.components import Traits
from pipegraph.contracts import FanIn


class InTurn(FanIn):
    """One item of each input in turn, until all have ended; one that has ended is left out.

    Attributes:
        first: the input with which epoch 0 begins.
    """

    traits = Traits(seeds_itself=True, trusted=True, separate=True)
    first = 0

    def begin(self, inputs: int, epoch: int) -> None:
        self._inputs = inputs
        self._sent, self._at = 0, 0 if epoch else self.first
        self._ended: set[int] = set()

    def next_input(self) -> int | None:
        if len(self._ended) == self._inputs:
            return None
        while self._at in self._ended:
            self._at = (self._at + 1) % self._inputs
        return self._at

    def end_input(self, index: int) -> None:
        self._ended.add(index)

    def process(self, chunk: Chunk) -> Chunk:
        self._sent, self._at = self._sent + 1, (self._at + 1) % self._inputs
        return chunk

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        return sum(lengths)

    def cursor(self, positions: Sequence[Cursor]) -> Cursor:
        return (self._sent, self._at, *positions)

    def cursors(self, cursor: Cursor, inputs: int) -> list[Cursor]:
        self._sent, self._at = cursor[:2]
        return list(cursor[2:])
