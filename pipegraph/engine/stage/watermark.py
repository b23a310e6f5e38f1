"""The watermark of a completion-order stage: its restart point, from the open tickets. Pure."""

from __future__ import annotations

from pipegraph.chunk import Cursor


class Watermark:
    """Tickets are taken in order and finished in any order; the watermark is the start of the oldest open one.

    >>> mark = Watermark()
    >>> mark.start(0, 10, 11); mark.start(1, 11, 12)
    >>> mark.finish(1)   # 10 is still open
    10
    >>> mark.finish(0)
    12
    """

    __slots__ = ("_after", "_open")

    def __init__(self) -> None:
        self._open: dict[int, Cursor] = {}
        self._after: Cursor = None

    def start(self, ticket: int, before: Cursor, after: Cursor) -> None:
        """A worker has taken an item. Called in the order of tickets."""
        self._open[ticket] = before
        self._after = after

    def current(self) -> Cursor:
        """The watermark: all items before this cursor are finished."""
        for before in self._open.values():  # insertion order is ticket order
            return before
        return self._after

    def finish(self, ticket: int) -> Cursor:
        """All items of a ticket were put; returns the new watermark."""
        self._open.pop(ticket, None)
        return self.current()

    def oldest(self) -> int | None:
        """The oldest open ticket; None if there is none."""
        for ticket in self._open:
            return ticket
        return None
