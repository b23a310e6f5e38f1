"""The blocks that are being loaded, and which of them go on where they want more room than there is.

The caller holds the lock of ``changed`` around everything here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from pipegraph.errors import LoaderClosedError
from pipegraph.reader.block_sources import Shelf
from pipegraph.reader.block_table import Entry, Held
from pipegraph.reader.schedule import Itinerary


class GaveWayError(Exception):
    """A load made room for one that was begun before it; it begins again later."""


@final
class Loads:
    """Loads under way, the one begun first comes first.

    Args:
        changed: notified when a load ends, and by `released`.
    """

    def __init__(self, shelf: Shelf, held: Held, changed: threading.Condition) -> None:
        self._shelf, self._held, self._changed = shelf, held, changed
        self._entries: list[Entry] = []
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._entries)

    def may_begin(self, entry: Entry) -> bool:
        """Whether there is room for it beside the others; alone any block may try."""
        return not self._entries or self._held.fits(entry)

    def begin(self, entry: Entry, way: Itinerary) -> None:
        """A load begins."""
        self._held.begin(entry, way)
        self._entries.append(entry)

    def end(self, entry: Entry) -> None:
        """It is over; the caller notifies ``changed``."""
        self._entries.remove(entry)

    def released(self) -> None:
        """A block is read from no more."""
        if self._waiting:
            self._changed.notify_all()

    def grow(self, entry: Entry, nbytes: int, way: Itinerary, is_closed: Callable[[], bool]) -> None:
        """A load under way holds so many bytes by now; waits until there is room for them.

        Of several that want more than there is, the one begun first goes on, as soon as what is being read from is
        released; the others give way. So one of them always ends.

        Raises:
            MemoryLimitError: there is no room for it even alone.
            GaveWayError: it makes room for another.
        """
        while not self._held.grow(entry, nbytes, way):
            if is_closed():
                raise LoaderClosedError("the pipeline was closed while a block was read")
            if nbytes > self._shelf.budget():
                raise self._shelf.too_large(entry.number)
            if self._entries[0] is not entry:
                raise GaveWayError
            self._waiting += 1
            try:
                self._changed.wait()
            finally:
                self._waiting -= 1
