"""Sources, fan-ins and routes as users write them, in several ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import FanIn, FanOut, Source
from pipegraph.order import StridedOrder
from random_graphs.stage_functions import weigh


class InSequence(Source):
    """0, 1, 2 ..., one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def length(self, epoch: int, rank: int, world_size: int) -> int:
        return len(range(rank, self.count, world_size))

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        for position in range(rank + start * world_size, self.count, world_size):
            yield position, (position + epoch) % max(1, self.count)


class Backwards(InSequence):
    """The same, and the last position first."""

    random_access = True

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int]:
        return iter(range(self.count - 1 - start, -1, -1))

    def read(self, position: int, epoch: int) -> Any:
        return (position + epoch) % max(1, self.count)


class Shuffled(InSequence):
    """In another order in each epoch, by an order of pipegraph's."""

    random_access = True
    order = StridedOrder()

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int]:
        return iter(self.order.positions(self.count, 0, epoch, rank, world_size, start).tolist())

    def index_of(self, position: int, epoch: int) -> int:
        return int(self.order.samples_at(self.count, np.array([position]), 0, epoch)[0])

    def read(self, position: int, epoch: int) -> Any:
        return self.index_of(position, epoch)


class InTurn(FanIn):
    """``run`` items of each input in turn, until all have ended; its cursor begins with the positions."""

    def __init__(self, run: int) -> None:
        self.run = run

    def begin(self, inputs: int, epoch: int) -> None:
        self.inputs_here, self.at, self.sent = inputs, 0, 0
        self.ended: set[int] = set()

    def next_input(self) -> int | None:
        if len(self.ended) == self.inputs_here:
            return None
        while self.at in self.ended:
            self.at, self.sent = (self.at + 1) % self.inputs_here, 0
        return self.at

    def end_input(self, index: int) -> None:
        self.ended.add(index)

    def process(self, chunk: Chunk) -> Chunk | None:
        self.sent += 1
        if self.sent == self.run:
            self.at, self.sent = (self.at + 1) % self.inputs_here, 0
        return chunk

    def merged_length(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def cursor(self, positions: Sequence[Any]) -> Any:
        return (*positions, self.at, self.sent)

    def cursors(self, cursor: Any, inputs: int) -> Sequence[Any]:
        *positions, self.at, self.sent = cursor
        return positions


class Counted(InTurn):
    """Its cursor is a list, and begins with the number of outputs."""

    def begin(self, inputs: int, epoch: int) -> None:
        super().begin(inputs, epoch)
        self.outputs_made = 0

    def process(self, chunk: Chunk) -> Chunk | None:
        self.outputs_made += 1
        return super().process(chunk)

    def cursor(self, positions: Sequence[Any]) -> Any:
        return [self.outputs_made, self.at, self.sent, *positions]

    def cursors(self, cursor: Any, inputs: int) -> Sequence[Any]:
        self.outputs_made, self.at, self.sent, *positions = cursor
        return positions


class OwnRoute(FanOut):
    """Goes by what is in the item."""

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs

    def choose(self, chunk: Chunk) -> int:
        return weigh(chunk.data) // 3 % self.outputs


class ByPosition(OwnRoute):
    """Goes by the position of the item."""

    def choose(self, chunk: Chunk) -> int:
        return int(chunk.positions[0]) % self.outputs


class ByDraw(OwnRoute):
    """Goes by a draw from torch's generator, which is the item's own."""

    def choose(self, chunk: Chunk) -> int:
        return int(torch.randint(self.outputs, ()))


ROUTES = [OwnRoute, ByPosition, ByDraw]
