"""Fan-ins and routes: ``Zip``, ``Concat``, ``Mix``, ``Route``, ``Merge``; and ``Take``, which ends an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, final

from pipegraph.batches import AS_AT_THE_TOP, WHOLE
from pipegraph.chunk import Chunk, Cursor
from pipegraph.contracts import Context, FanIn, FanOut, Operator, Source, Traits
from pipegraph.errors import GraphError, shown
from pipegraph.in_turn import InTurn
from pipegraph.integers import integer
from pipegraph.parameters import function_name, plain_function
from pipegraph.randomness import uniform


class _Remembering(FanIn):
    """A fan-in whose cursor is the values of some attributes, one that grows first, and the inputs' positions."""

    remembers: ClassVar[tuple[str, ...]] = ()

    def cursor(self, positions: Sequence[Cursor]) -> Cursor:
        return (*[getattr(self, name) for name in self.remembers], *positions)

    def cursors(self, cursor: Cursor, inputs: int) -> list[Cursor]:
        for name, value in zip(self.remembers, cursor, strict=False):
            setattr(self, name, value)
        return list(cursor[len(self.remembers) :])


@final
class Zip(_Remembering):
    """Join inputs into tuples of one item from each, until the shortest input ends.

    Keys and positions are those of the first input.

    Items are paired in the order in which they come. If a ``Filter`` or ``Skip`` leaves out an item of one input, all
    later items of that input get other partners. So put a ``Filter`` or ``Skip`` after the ``Zip``.
    """

    traits = Traits(seeds_itself=True, trusted=True, pairs=True)
    name = "zip"

    def begin(self, inputs: int, epoch: int) -> None:
        self._inputs = inputs
        self._held: list[Chunk] = []
        self._over = False

    def next_input(self) -> int | None:
        return None if self._over else len(self._held)

    def end_input(self, index: int) -> None:
        self._over = True

    def process(self, chunk: Chunk) -> Chunk | None:
        self._held.append(chunk)
        if len(self._held) < self._inputs:
            return None
        chunks, self._held = self._held, []
        both = chunks[0].replace(tuple([each.data for each in chunks]))
        if both.batched:
            both.layout = tuple(
                [(each.layout or AS_AT_THE_TOP) if each.batched else WHOLE for each in chunks]
            )
        return both

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        return min(lengths)


@final
class Concat(_Remembering):
    """Read one input after the other."""

    traits = Traits(seeds_itself=True, trusted=True, separate=True)
    remembers = ("_at",)

    def begin(self, inputs: int, epoch: int) -> None:
        self._inputs = inputs
        self._at = 0

    def next_input(self) -> int | None:
        return self._at if self._at < self._inputs else None

    def end_input(self, index: int) -> None:
        self._at += 1

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        return sum(lengths)


@final
class Mix(_Remembering):
    """Take each item from an input chosen at random by weights.

    The choice depends on the seed and the output's number, so it is the same on every rank.

    Args:
        weights: one per input, positive.
        stop: ``"first"`` ends the epoch when the first input ends. ``"all"`` continues with the other inputs, with
            renormalised weights, until all have ended.

    Raises:
        GraphError: a weight is not positive, ``stop`` is unknown, or, at the plan, the number of inputs differs.
    """

    remembers = ("_drawn", "_ended")

    def __init__(self, weights: Sequence[float], stop: Literal["first", "all"] = "first") -> None:
        try:
            self.weights = tuple(float(weight) for weight in weights)
        except (TypeError, ValueError):
            self.weights = ()
        if not self.weights or any(not 0 < weight < math.inf for weight in self.weights):
            raise GraphError(f"Mix: weights must be positive numbers, one per input, got {shown(weights)}")
        if stop not in ("first", "all"):
            raise GraphError(f'Mix: stop must be "first" or "all", got {shown(stop)}')
        self.stop = stop
        self._context = Context("")

    @property
    def traits(self) -> Traits:
        return Traits(seeds_itself=True, trusted=True, separate=True, bind=self._bound)

    def _bound(self, upstream: Sequence[Operator | Source]) -> Mix:
        if len(upstream) != len(self.weights):
            raise GraphError(
                f"Mix: {len(self.weights)} weights for {len(upstream)} inputs; give one weight per input"
            )
        return self

    def config(self) -> dict[str, Any]:
        return {"weights": self.weights, "stop": self.stop}

    def open(self, context: Context) -> None:
        self._context = context

    def begin(self, inputs: int, epoch: int) -> None:
        self._epoch = epoch
        self._drawn = 0
        self._ended = (False,) * inputs
        self._over = False
        self._choice: int | None = None

    def next_input(self) -> int | None:
        if self._over:
            return None
        if self._choice is None:
            self._choice = self._draw()
        return self._choice

    def _draw(self) -> int:
        alive = [i for i, ended in enumerate(self._ended) if not ended]
        total = sum(self.weights[i] for i in alive)
        point = total * uniform("mix", self._context.seed, self._epoch, self._context.stage, self._drawn)
        for i in alive:
            point -= self.weights[i]
            if point < 0:
                return i
        return alive[-1]

    def end_input(self, index: int) -> None:
        self._ended = (*self._ended[:index], True, *self._ended[index + 1 :])
        self._choice = None
        self._over = self.stop == "first" or all(self._ended)

    def process(self, chunk: Chunk) -> Chunk:
        self._drawn += 1
        self._choice = None
        return chunk

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        return sum(lengths) if self.stop == "all" else None


@final
class Take(_Remembering):
    """Pass on the first ``count`` items of each epoch, on each rank. No more items are read than those already in work.

    Args:
        count: number of items (samples or batches, whichever the input gives), 0 or more.

    Raises:
        GraphError: ``count`` is below 0.
    """

    traits = Traits(seeds_itself=True, trusted=True, needs_order=True)
    remembers = ("_taken",)
    inputs = 1

    def __init__(self, count: int) -> None:
        self.count = integer(count, "Take: count", 0)

    def config(self) -> dict[str, Any]:
        return {"count": self.count}

    def begin(self, inputs: int, epoch: int) -> None:
        self._taken = 0
        self._ended = False

    def next_input(self) -> int | None:
        return None if self._ended or self._taken >= self.count else 0

    def end_input(self, index: int) -> None:
        self._ended = True

    def process(self, chunk: Chunk) -> Chunk:
        self._taken += 1
        return chunk

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        return min(self.count, lengths[0])


@final
class Route(FanOut):
    """Send each chunk to one of several downstream nodes: ``graph.add(op, routed[0])``.

    Args:
        choose: a function that returns, for an item, the number of the output that gets it.
        outputs: the number of outputs.

    Raises:
        GraphError: ``outputs`` is below 1, or ``choose`` is not a plain function.
        IndexError: while it runs: ``choose`` returned a number that no output has.
    """

    def __init__(self, choose: Callable[[Any], int], outputs: int) -> None:
        plain_function(choose, "Route: choose", "an item")
        self.function = choose
        self.outputs = integer(outputs, "Route: outputs")

    def config(self) -> dict[str, Any]:
        return {"choose": function_name(self.function), "outputs": self.outputs}

    @property
    def traits(self) -> Traits:
        return Traits(functions=(self.function,))

    def choose(self, chunk: Chunk) -> int:
        return self.function(chunk.data)


@final
class Merge(InTurn):
    """One item of each input in turn, until all have ended. To keep an order of items that go different ways, branch
    inside a function instead.
    """
