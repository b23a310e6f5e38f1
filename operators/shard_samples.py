"""What a ``ShardSelect`` hands to ``Load``: samples and whole parts, with the feed that they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph import concurrency
from pipegraph.contracts import Context

if TYPE_CHECKING:
    from pipegraph.operators.shards import ShardSelect
    from pipegraph.reader.block_reader import BlockReader
    from pipegraph.reader.uses import RankSteps
    from pipegraph.storage import Part


class ShardFeed:
    """What one loader's ``ShardSelect`` deals, epoch by epoch. It travels with the samples to their ``Load``.

    Thread-safe.
    """

    def __init__(self, select: ShardSelect, context: Context) -> None:
        self.select = select
        self.seed, self.rank, self.world_size = context.seed, context.rank, context.world_size
        self._lock = concurrency.Lock()
        self._deals: list[RankSteps] = []
        self._listeners: list[BlockReader] = []

    def new_run(self) -> None:
        """What was dealt does not hold any more."""
        with self._lock:
            self._deals = []
            for listener in self._listeners:
                listener.new_run()

    def deal(self, deal: RankSteps) -> None:
        """The steps of another epoch begin to be dealt."""
        with self._lock:
            self._deals = [*self._deals[-1:], deal]
            for listener in self._listeners:
                listener.dealt(deal)

    def subscribe(self, listener: BlockReader) -> None:
        """Notify this one too, at once of what is being dealt."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)
                for deal in self._deals:
                    listener.dealt(deal)


class ShardSample:
    """Sample ``index`` of block ``number``; ``Load`` reads it."""

    __slots__ = ("feed", "index", "number")

    def __init__(self, feed: ShardFeed, number: int, index: int) -> None:
        self.feed = feed
        self.number = number
        self.index = index

    def __repr__(self) -> str:
        return f"<ShardSample {self.index} of block {self.number}>"


class ShardPart:
    """A whole part, by its number in the list of parts; ``Load`` reads its samples."""

    __slots__ = ("feed", "number", "part")

    def __init__(self, feed: ShardFeed, number: int, part: Part) -> None:
        self.feed = feed
        self.number = number
        self.part = part

    def __repr__(self) -> str:
        return f"<ShardPart {self.number}: {self.part.name}>"
