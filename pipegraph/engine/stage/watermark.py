"""The restart point of a completion-order stage: pure bookkeeping over its open tickets."""

from __future__ import annotations

from pipegraph.chunk import Cursor


class Watermark:
    """Tickets are taken in order and finished in any; the watermark is the oldest open one's start.

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
        """A worker has taken an item; called in the order of tickets."""
        self._open[ticket] = before
        self._after = after

    def current(self) -> Cursor:
        """Everything before this cursor is finished."""
        for before in self._open.values():  # insertion order is ticket order
            return before
        return self._after

    def finish(self, ticket: int) -> Cursor:
        """A ticket's items have all been put; returns the watermark then."""
        self._open.pop(ticket, None)
        return self.current()

    def oldest(self) -> int | None:
        """The oldest open ticket."""
        for ticket in self._open:
            return ticket
        return None
