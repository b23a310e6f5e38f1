"""Splits bundles into rows: for a channel whose reader takes one row at a time (``RowIntake``), and for a loop that has
taken a bundle of which its operator cannot do several (``rows_of``)."""

from __future__ import annotations

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Item
from pipegraph.engine.channel import Channel
from pipegraph.engine.memory import Account
from pipegraph.tree import buffers


def rows_of(bundle: Bundle, account: Account) -> list[Chunk]:
    """The samples of a bundle as chunks, each accounted with its own buffers."""
    ones = [bundle.one(index) for index in range(bundle.count)]
    if bundle.buffers:
        for one in ones:
            one.buffers = buffers(one.data)
            one.nbytes = sum([nbytes for _, nbytes in one.buffers])
        account.exchange(bundle.buffers, [one.buffers for one in ones])
    return ones


class RowIntake:
    """Takes single rows from a channel, for one worker."""

    def __init__(self, channel: Channel, account: Account) -> None:
        self._channel = channel
        self._account = account
        self._rows: list[Chunk] = []  # the rest of a bundle, in reverse order

    def get(self) -> Item:
        """The next chunk or token; blocks while there is none."""
        if self._rows:
            return self._rows.pop()
        item: Item = self._channel.get()
        if item.__class__ is not Bundle:
            return item
        self._rows = rows_of(item, self._account)[::-1]
        return self._rows.pop()

    def drop(self) -> None:
        """Drop the rest of the bundle taken last."""
        for one in self._rows:
            self._account.release(one.buffers)
        self._rows.clear()
