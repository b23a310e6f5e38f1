"""The base of sources with a pg.order: from a position of the epoch's stream to an index."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pipegraph.contracts import Context, Drawn, History, Source, Traits
from pipegraph.errors import GraphError
from pipegraph.integers import flag
from pipegraph.order.base import Order
from pipegraph.order.layout import Int64Array, ManifestLike, total_samples

if TYPE_CHECKING:
    from pipegraph.order import LaneOrder, StridedOrder

POSITIONS_AT_ONCE = 4096
"""Positions drawn from an order in one call: the cost of a draw is shared, the array stays in cache."""


LONGEST_CONFIG = 120
"""Characters of an order's configuration that a message shows."""


def order_of(order: Order | None, shuffle: bool | None, default: StridedOrder | LaneOrder, who: str) -> Order:
    """The order that was given, or the default one, shuffled or not."""
    if shuffle is None:
        return default if order is None else order
    shuffled = flag(shuffle, f"{who}: shuffle", rule="True, False or None")
    if order is not None:
        raise GraphError(
            f"{who}: give order= or shuffle=, not both: the order {order!r} says whether it shuffles"
        )
    return replace(default, shuffle=shuffled)


def digest_of(names: Iterable[str]) -> str:
    """One short hash of many names, in their order."""
    text = "\0".join(names).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=6).hexdigest()


class OrderedSource(Source):
    """A random-access source whose order, one of ``pg.order``, gets the graph's seed and the pass's epoch as they
    are.
    """

    random_access = True
    reads_ahead = True

    def __init__(self, order: Order) -> None:
        self.order = order
        self.seed = 0
        self._stride = 1
        self._history: tuple[int, History] = (0, ())
        self._block: tuple[tuple[int, int, Any], Int64Array] | None = None

    @property
    def traits(self) -> Traits:
        return Traits(
            seeds_itself=True,
            trusted=True,
            blocks=self.random_access,
            sees=self.sees,
            deals_by=self.deals_by,
            deals_with=self.deals_with,
            origin=self.origin,
            has_length=self.has_length,
        )

    @abstractmethod
    def layout(self) -> Any:
        """What the order is over; see ``pg.order``."""

    def layout_of(self, epoch: int) -> Any:
        """As :meth:`layout`, as it was when the epoch began."""
        return self.layout()

    def item(self, index: Any) -> Any:
        """The sample of an index; a source defines this or :meth:`read_into`."""
        found: list[Any] = []
        self.read_into(found, [index], 0)
        return found[0]

    def sees(self) -> str:
        layout = self.layout()
        digest = f", digest {layout.digest[:12]}" if isinstance(layout, ManifestLike) else ""
        return f"{total_samples(layout)} samples{digest}"

    def deals_by(self) -> str:
        config = dict(self.order.config())
        name = config.pop("order", type(self.order).__name__)
        text = json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__)
        return f"{name} {text if len(text) <= LONGEST_CONFIG else f'of digest {digest_of([text])}'}"

    def deals_with(self, seed: int) -> None:
        self.seed = seed

    def origin(self) -> str:
        return ""

    def open(self, context: Context) -> None:
        self.seed = context.seed
        self._stride = context.world_size if self.order.in_turn else 1

    def has_length(self) -> bool:
        return True

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        return self._left(epoch, rank, world_size, self._consumed(epoch))

    def _left(self, epoch: int, rank: int, world_size: int, history: History) -> int:
        layout = self.layout()
        if not total_samples(layout):
            return 0
        return self.order.length(layout, world_size, history, rank, self.seed, epoch)

    def begin_run(self, epoch: int, history: History) -> None:
        self._history = (epoch, history)

    def _consumed(self, epoch: int) -> History:
        return self._history[1] if epoch == self._history[0] else ()

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        stop = self._left(epoch, rank, world_size, self._consumed(epoch))
        steps = range(start, stop)
        blocks = (
            steps[first : first + POSITIONS_AT_ONCE] for first in range(0, len(steps), POSITIONS_AT_ONCE)
        )
        return chain.from_iterable(self.positions_of(block, epoch, rank, world_size) for block in blocks)

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        if not self.random_access:
            return super().positions_of(steps, epoch, rank, world_size)
        layout, history = self.layout_of(epoch), self._consumed(epoch)
        drawn: list[int] = self.order.positions(
            layout, self.seed, epoch, rank, world_size, steps.start, steps.stop, history
        ).tolist()
        return drawn

    def index_of(self, position: int, epoch: int) -> int:
        """The index at a position; those that this rank reads next are drawn together."""
        return int(self.indices_of([position], epoch)[0])

    def indices_of(self, positions: Sequence[int], epoch: int) -> Sequence[Any]:
        drawn = np.fromiter(positions, np.int64, len(positions))
        places = drawn // self._stride % POSITIONS_AT_ONCE
        firsts = drawn - places * self._stride
        found: list[int] = []
        start = 0
        for stop in (*((firsts[1:] != firsts[:-1]).nonzero()[0] + 1).tolist(), len(drawn)):
            found += self._drawn_from(int(firsts[start]), epoch)[places[start:stop]].tolist()
            start = stop
        return found

    def _drawn_from(self, first: int, epoch: int) -> Int64Array:
        """The indices at the positions from ``first`` on that this rank reads together."""
        layout = self.layout_of(epoch)
        key = epoch, first, layout if layout.__class__ is int else None  # a dataset may grow
        if self._block is None or self._block[0] != key:
            drawn = np.arange(first, first + POSITIONS_AT_ONCE * self._stride, self._stride)
            self._block = key, self.order.samples_at(layout, drawn, self.seed, epoch)
        return self._block[1]

    def read(self, position: int, epoch: int) -> Any:
        return self.item(self.index_of(position, epoch))

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        found.extend(map(self.item, indices[start:]))
