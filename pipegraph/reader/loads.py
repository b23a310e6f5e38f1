"""Blocks being loaded, and which continue when memory is short.

The caller holds the lock of ``changed`` around everything here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipegraph.errors import LoaderClosedError
from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.block_table import BlockEntry, BlockTable
from pipegraph.reader.schedule import ReadSchedule


class GaveWayError(Exception):
    """A load made room for one that was begun before it; it begins again later."""


class Loads:
    """Loads under schedule, the one begun first comes first.

    Args:
        changed: notified when a load ends, and by `released`.
    """

    def __init__(self, source: BlockSource, table: BlockTable, changed: threading.Condition) -> None:
        self._source, self._table, self._changed = source, table, changed
        self._entries: list[BlockEntry] = []
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._entries)

    def may_begin(self, entry: BlockEntry) -> bool:
        """Whether there is room for it beside the others; alone any block may try."""
        return not self._entries or self._table.fits(entry)

    def begin(self, entry: BlockEntry, schedule: ReadSchedule) -> None:
        """A load begins."""
        self._table.begin(entry, schedule)
        self._entries.append(entry)

    def end(self, entry: BlockEntry) -> None:
        """It is over; the caller notifies ``changed``."""
        self._entries.remove(entry)

    def released(self) -> None:
        """A use of a block has ended."""
        if self._waiting:
            self._changed.notify_all()

    def grow(
        self, entry: BlockEntry, nbytes: int, schedule: ReadSchedule, is_closed: Callable[[], bool]
    ) -> None:
        """A running load holds so many bytes now; waits until there is room for them.

        If several need more than there is, the one begun first continues as soon as the blocks being read are
        released; the others give schedule. So one of them always finishes.

        Raises:
            MemoryLimitError: there is no room for it even alone.
            GaveWayError: it makes room for another.
        """
        while not self._table.grow(entry, nbytes, schedule):
            if is_closed():
                raise LoaderClosedError("the pipeline was closed while a block was read")
            if nbytes > self._source.budget():
                raise self._source.too_large(entry.number)
            if self._entries[0] is not entry:
                raise GaveWayError
            self._waiting += 1
            try:
                self._changed.wait()
            finally:
                self._waiting -= 1
