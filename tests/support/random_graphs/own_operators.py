"""Sources, fan-ins and routes as users write them: right ones in several ways, and wrong ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import FanIn, FanOut, Operator, Source
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


# -- wrong ones --------------------------------------------------------------------------------------


class FromTheStart(InTurn):
    def cursors(self, cursor: Any, inputs: int) -> Sequence[Any]:
        return [None] * inputs


class Unsorted(InTurn):
    def cursor(self, positions: Sequence[Any]) -> Any:
        return (-self.at - self.sent, *positions, self.at)

    def cursors(self, cursor: Any, inputs: int) -> Sequence[Any]:
        _, *positions, self.at = cursor
        return positions


class Forgetful(InTurn):
    def cursor(self, positions: Sequence[Any]) -> Any:
        return tuple(positions)

    def cursors(self, cursor: Any, inputs: int) -> Sequence[Any]:
        return cursor  # type: ignore[no-any-return]


class OneLate(InTurn):
    held: Chunk | None = None

    def process(self, chunk: Chunk) -> Chunk | None:
        held, self.held = self.held, super().process(chunk)
        return held


class ByCounter(OwnRoute):
    """Goes by its calls, ``run`` for each output."""

    def __init__(self, run: int) -> None:
        super().__init__(2)
        self.run, self.calls = run, 0

    def choose(self, chunk: Chunk) -> int:
        self.calls += 1
        return (self.calls - 1) // self.run % 2


class BySharedCounter(ByCounter):
    """The same, with a counter that all copies share."""

    def __init__(self, run: int) -> None:
        super().__init__(run)
        self.count = itertools.count()

    def choose(self, chunk: Chunk) -> int:
        return next(self.count) // self.run % 2


WRONG: list[Callable[[int], Operator]] = [
    FromTheStart,
    Unsorted,
    Forgetful,
    OneLate,
    ByCounter,
    BySharedCounter,
]
