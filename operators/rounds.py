"""Repeat and Mix(stop="repeat"): a source read several times in one epoch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, final

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Drawn, History, Operator, Source, Traits
from pipegraph.errors import GraphError
from pipegraph.integers import integer
from pipegraph.parameters import without_rewind

_POSITION_BITS = 40
"""Of a position those below are its place in a round, those above the round's number."""
_EPOCH_BITS = 20
"""Where nobody knows how many rounds an epoch has, round k of epoch e is the source's epoch ``e + k * 2**20``."""


def round_of(chunk: Chunk) -> int:
    """The latest round that a sample of this chunk is of."""
    return max(int(lineage[1]) for lineage in chunk.lineages) >> _POSITION_BITS


class Rounds(Source):
    """Another source ``count`` times in each epoch (None: endlessly, until a round has no item), each time in the order
    of an epoch of its own. It cannot continue at another world size.
    """

    def __init__(self, source: Source, count: int | None) -> None:
        if isinstance(source, Rounds):
            raise GraphError(
                f"{source.name}: it is read several times in an epoch already; leave out one Repeat, or give "
                'Mix(stop="repeat") inputs that are not repeated'
            )
        self.source: Any = source
        self.count = count
        self.random_access = source.random_access
        self.reads_ahead = source.reads_ahead
        self.gives = source.gives
        self._began: tuple[int, int] = (0, 0)
        self._from: tuple[int, Any] | None = None

    @property
    def index_of(self) -> Callable[[Any, int], Any] | None:  # type: ignore[override]
        return None if self.source.index_of is None else self._index_of

    def _index_of(self, position: Any, epoch: int) -> Any:
        number, place = self._decoded(position)
        assert self.source.index_of is not None
        return self.source.index_of(place, self._epoch(epoch, number))

    @property
    def name(self) -> str:
        return str(self.source.name)

    def config(self) -> dict[str, Any]:
        return {"source": type(self.source).__qualname__, "rounds": self.count, **self.source.config()}

    @property
    def traits(self) -> Traits:
        of: Traits = self.source.traits
        length = None if of.has_length is None else self._has_length
        return replace(
            of,
            blocks=of.blocks and self.random_access,
            columns=False,
            in_memory=False,
            inherits=False,
            waits=False,
            sent_as="",
            one_world_size=True,
            has_length=length,
        )

    def open(self, context: Context) -> None:
        self.source = copy.copy(self.source)
        self.source.open(context)

    def close(self) -> None:
        self.source.close()

    def cancel(self) -> None:
        self.source.cancel()

    def uncancel(self) -> None:
        self.source.uncancel()

    def begin_run(self, epoch: int, history: History) -> None:
        super().begin_run(epoch, history)
        self.source.begin_run(epoch, history)
        self._from = None

    def _epoch(self, epoch: int, number: int) -> int:
        """The source's epoch that is read as a round: each is another one, and they follow each other if known."""
        return epoch + (number << _EPOCH_BITS) if self.count is None else epoch * self.count + number

    def _has_length(self) -> bool:
        return self.count is not None and self.source.traits.has_length()

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        rounds = range(self.count or 0)
        sizes = [self.source.length(self._epoch(epoch, number), rank, world_size) for number in rounds]
        return None if self.count is None or None in sizes else sum(size or 0 for size in sizes)

    # -- rounds of a known length ----------------------------------------------------------------------

    def _places(
        self, epoch: int, rank: int, world_size: int, start: int
    ) -> Iterator[tuple[int, int, int | None]]:
        """``(round, its step to begin with, items in it)`` from step ``start`` on."""
        number = 0
        while self.count is None or number < self.count:
            size = self.source.length(self._epoch(epoch, number), rank, world_size)
            if size == 0:
                return
            if size is not None and start >= size:
                start -= size
            else:
                yield number, start, size
                start = 0
            number += 1

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        places = self._places(epoch, rank, world_size, start)
        first_place = next(places, None)
        if self.traits.sampled:  # a sampler comes to its order of a round by those before it
            for before in range((self.count or 0) if first_place is None else first_place[0]):
                deque(self.source.positions(self._epoch(epoch, before), rank, world_size, 0), maxlen=0)
        for number, first, size in () if first_place is None else chain([first_place], places):
            if size is None:
                raise GraphError(
                    f"{self.name}: its sampler has no length, so it cannot be repeated; give it a __len__"
                )
            for place in self.source.positions(self._epoch(epoch, number), rank, world_size, first):
                if isinstance(place, Drawn):
                    yield Drawn(_coded(number, place.position), place)
                else:
                    yield _coded(number, place)

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        found: list[int] = []
        for number, first, size in self._places(epoch, rank, world_size, steps.start):
            if size is None:  # where it ends is known once it has been read
                break
            last = min(size, first + len(steps) - len(found))
            inner = self.source.positions_of(range(first, last), self._epoch(epoch, number), rank, world_size)
            found += [_coded(number, place) for place in inner]
            if len(found) >= len(steps):
                break
        return found

    def read(self, position: Any, epoch: int) -> Any:
        number, place = self._decoded(position)
        return self.source.read(place, self._epoch(epoch, number))

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        found: list[Any] = []
        for number, coded in groupby(map(self._decoded, positions), itemgetter(0)):
            indices = self.source.indices_of([place for _, place in coded], self._epoch(epoch, number))
            found += [(indices, place) for place in range(len(indices))]
        return found

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        while start < len(indices):
            inner, first = indices[start]
            stop = start + 1
            while stop < len(indices) and indices[stop][0] is inner:
                stop += 1
            made: list[Any] = []
            try:
                self.source.read_into(made, inner[: first + stop - start], first)
            finally:
                found += made
            start = stop

    def _decoded(self, position: Any) -> tuple[int, Any]:
        if isinstance(position, Drawn):
            return position.position >> _POSITION_BITS, position.index
        return position >> _POSITION_BITS, position & ((1 << _POSITION_BITS) - 1)

    # -- rounds that are read in sequence --------------------------------------------------------------

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        if self.random_access:
            yield from super().iterate(epoch, rank, world_size, start)
            return
        number = begins = known = 0  # the step of the round from which on the source reads
        if self._from is not None:
            number, begins, snapshot = self._from[1]
            if snapshot is not None:
                known = self._from[0] - begins
                self.source.restore(known, snapshot)
            self._from = None
        source = self.source
        while self.count is None or number < self.count:
            inner = self._epoch(epoch, number)
            skip = start - begins
            size = source.length(inner, rank, world_size)
            self._began = (number, begins)
            if size is None:  # it may end before the step to begin with
                items = without_rewind(iter(source.iterate(inner, rank, world_size, known)))
                came = known + sum(1 for _ in islice(items, skip - known))
            else:
                came = min(size, skip)
                items = source.iterate(inner, rank, world_size, came)
            known = 0
            for place, item in items:
                came += 1
                yield _coded(number, place), item
            if not came:
                return
            number, begins = number + 1, begins + came
            start = max(start, begins)

    def snapshot(self) -> Any:
        inner = self.source.snapshot()
        return inner if self.random_access else [*self._began, inner]

    def between(self) -> Any:
        return self.source.between()

    def restore(self, step: int, snapshot: Any) -> None:
        if self.random_access:
            self.source.restore(step, snapshot)
        else:
            self._from = (step, snapshot)


def _coded(number: int, position: int) -> int:
    return number << _POSITION_BITS | position


@final
class Repeat(Operator):
    """Repeat the stream ``times`` times in each epoch. Its source is read that many times, each time in another order:
    round k of epoch e is its epoch ``e * times + k``, which its sampler's ``set_epoch`` and its functions get.

    It may follow any chain of stages with one input and one reader each, except ``Take``. Windows, batches and packed
    rows may span two rounds. The stage itself does nothing and is left out of the plan. The
    positions of round k, counted from 0, begin at ``k * 2**40``, in errors and profiles too.

    Args:
        times: rounds in an epoch.

    Raises:
        GraphError: ``times`` is below 1; at the plan: a stage above has several inputs or readers.
    """

    def __init__(self, times: int) -> None:
        self.times = integer(times, "Repeat: times")

    def config(self) -> dict[str, Any]:
        return {"times": self.times}

    @property
    def traits(self) -> Traits:
        return Traits(repeated=lambda source: Rounds(source, self.times), needless=self._needless)

    def _needless(self) -> str:
        return f"its source is read {self.times} times in an epoch"

    def process(self, chunk: Chunk) -> Chunk:
        return chunk
