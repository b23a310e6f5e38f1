"""Filters out unwanted items of an edge: of a discarded epoch, or delivered before a restart. Pure."""

from __future__ import annotations

from collections.abc import Callable

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch, Item


class Unwanted:
    """The filters of one edge.

    Attributes:
        discarded: the last epoch whose items are all unwanted.
        active: whether any item may be unwanted; while False, ``left_of`` need not be called.
    """

    __slots__ = ("_epoch", "_seen", "active", "discarded")

    def __init__(self) -> None:
        self.discarded = -1
        self.active = False
        self._epoch = -1
        self._seen: list[Callable[[Chunk], bool]] = []

    def discard(self, epoch: int) -> None:
        """Filter out all items of ``epoch`` or earlier."""
        self.discarded = max(epoch, self.discarded)
        self.active = True

    def skip(self, epoch: int, seen: Callable[[Chunk], bool]) -> None:
        """Filter out chunks of ``epoch`` for which ``seen`` is true; adds to its earlier filters."""
        self._epoch = epoch
        self._seen.append(seen)
        self.active = True

    def ended(self, epoch: int) -> None:
        """All of ``epoch`` has passed: remove its filters."""
        if self._seen and epoch >= self._epoch:
            self._seen.clear()
        self.active = bool(self._seen) or epoch < self.discarded

    def left_of(self, item: Item) -> Item | None:
        """The item, the wanted samples of a bundle, or None."""
        if isinstance(item, EndOfEpoch):
            return item
        if item.epoch <= self.discarded:
            return None
        if item.epoch != self._epoch or not self._seen:
            return item
        if isinstance(item, Bundle):
            return self._rows_of(item)
        return None if isinstance(item, Chunk) and self._was_seen(item) else item

    def _rows_of(self, bundle: Bundle) -> Bundle | None:
        kept = [
            index
            for index, row in enumerate(bundle.lineages)
            if not self._was_seen(Chunk(None, (row,), bundle.epoch, *bundle.place(index)))
        ]
        if len(kept) == bundle.count:
            return bundle
        if not kept:
            return None
        left = bundle.chosen(kept)
        left.buffers, left.nbytes = bundle.buffers, bundle.nbytes
        return left

    def _was_seen(self, item: Chunk) -> bool:
        return any(seen(item) for seen in self._seen)
