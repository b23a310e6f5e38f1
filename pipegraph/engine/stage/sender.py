"""Senders: put a stage's results in the queues of its consumers, in order or as they finish.

A *ticket* is the number with which a worker took its input. A loop calls ``send`` for each result of a ticket
(``last`` marks the final one), ``drop`` if there is no (further) result, and ``token`` for tokens. The loop need
not know its stage's order, nor whether consumers refuse items: both are handled here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency
from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Failure, Item, Token
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.channel import Channel
from pipegraph.tree import copy_containers

if TYPE_CHECKING:
    from pipegraph.engine.stage.stage_run import StageRun


class Sender:
    """The sender of a stage with a single worker; base class of the others.

    Args:
        channels: of the consumers; if there are none, items are dropped.
    """

    def __init__(self, stage: StageRun, channels: list[Channel]) -> None:
        self.stage = stage
        self.channels = channels

    def send(self, ticket: int, item: Item, last: bool = True, more: bool = False) -> bool:
        """Put a result of a ticket; blocks while there is no room. False if no consumer wanted it.

        Args:
            more: whether another ``send`` or :meth:`wake` follows before the caller waits for anything; only for
                stages with a single worker.
        """
        channels = self.channels
        if len(channels) == 1:
            sent = channels[0].put(item, True) if more else self._put(0, ticket, item, last)
            if not sent and item.buffers:
                self.stage.run.account.release(item.buffers)
        else:
            sent = self._fan_out(ticket, item, last)
        if last:
            self._done(ticket)
        return sent

    def wake(self) -> None:
        """Wake the next stage for items sent with ``more``."""
        if len(self.channels) == 1:
            self.channels[0].nudge()

    def drop(self, ticket: int) -> None:
        """Finish a ticket without a (further) result."""
        self._done(ticket)

    def token(self, ticket: int, token: Token) -> None:
        """Pass a token on, in its place."""
        if isinstance(token, EndOfEpoch) and (failure := self.stage.failures.at_end(token.epoch)) is not None:
            self.send(ticket, failure, False)
        self.send(ticket, token)

    def wait_turn(self, ticket: int) -> None:
        """Blocks until every earlier item of an ordered stage has left."""

    def _put(self, index: int, ticket: int, item: Item, last: bool) -> bool:
        return self.channels[index].put(item)

    def _done(self, ticket: int) -> None:
        """All results of a ticket have left."""

    def _fan_out(self, ticket: int, item: Item, last: bool) -> bool:
        channels = self.channels
        if not isinstance(item, Chunk):
            for index in range(len(channels)):
                self._put(index, ticket, item, last)
            return True
        if not channels:
            self.stage.run.account.release(item.buffers)
            return False
        account = self.stage.run.account
        if item.buffers:
            account.hold(item.buffers, len(channels) - 1)
        refused = 0
        # The first consumer gets the item itself, after the others have their copies.
        for index in range(len(channels) - 1, -1, -1):
            share = item
            if index:
                share = item.replace(copy_containers(item.data))
                share.buffers, share.nbytes, share.packed = item.buffers, item.nbytes, item.packed
            if not self._put(index, ticket, share, last):
                account.release(item.buffers)
                refused += 1
        return refused < len(channels)


class ByTicket(Sender):
    """The sender of an ordered stage with several workers: results leave in the order of tickets."""

    def drop(self, ticket: int) -> None:
        for channel in self.channels:
            channel.close_seq(ticket)
        self._done(ticket)

    def token(self, ticket: int, token: Token) -> None:
        if isinstance(token, EndOfEpoch) and self.stage.failures.judges_epochs:
            self.wait_turn(ticket)  # until the policy has been applied to all earlier items
        super().token(ticket, token)

    def wait_turn(self, ticket: int) -> None:
        self.channels[0].wait_turn(ticket)

    def _put(self, index: int, ticket: int, item: Item, last: bool) -> bool:
        return self.channels[index].put_at(ticket, item, last)

    def _done(self, ticket: int) -> None:
        self.stage.ordinals.forget(ticket)


class Watermark:
    """The restart point of a completion-order stage: where the oldest open ticket's item begins.

    Tickets are taken in order and finished in any order; all items before the watermark are finished.
    """

    __slots__ = ("_after", "_open")

    def __init__(self) -> None:
        self._open: dict[int, Cursor] = {}
        self._after: Cursor = None

    def start(self, ticket: int, item: Chunk | Failure) -> None:
        """A worker has taken an item. Called in the order of tickets."""
        if isinstance(item, Chunk):
            self._open[ticket], self._after = item.before, item.after
        else:  # a failure has no cursors: what it failed for comes next in a resumed run
            self._open[ticket] = self._after

    def current(self) -> Cursor:
        for before in self._open.values():  # insertion order is ticket order
            return before
        return self._after

    def finish(self, ticket: int) -> Cursor:
        """All items of a ticket were put; returns the new watermark."""
        self._open.pop(ticket, None)
        return self.current()


class AsFinished(Sender):
    """The sender of a completion-order stage: watermarks per epoch and consumer, epoch barriers, and a reorder window.

    In its channels an epoch is one sequence number, so that chunks of one epoch leave in any order.
    """

    def __init__(self, stage: StageRun, channels: list[Channel]) -> None:
        super().__init__(stage, channels)
        self._lock = concurrency.Lock()
        self._open: dict[int, tuple[int, int]] = {}  # ticket -> epoch and items taken before it
        self._taken = 0
        self._ending: dict[int, EndOfEpoch] = {}
        self._marks: dict[int, list[Watermark]] = {}
        self._window = 0
        self.set_window(stage.plan.workers, stage.plan.capacity)

    def set_window(self, workers: int, capacity: int) -> None:
        """Set how far ahead of the oldest unfinished item the stage may run, from its size."""
        self._window = 4 * (workers + capacity)
        self.stage.inboxes[0].nudge()

    def on_take(self, ticket: int, item: object) -> None:
        """Record that a worker takes an item; called in the order of tickets."""
        # A failure too: neither the end of its epoch nor a state, of what others have done since, may overtake it.
        if isinstance(item, Chunk | Failure):
            with self._lock:
                for mark in self._marks_of(item.epoch):
                    mark.start(ticket, item)
                self._open[ticket] = item.epoch, self._taken
                self._taken += item.count

    def _marks_of(self, epoch: int) -> list[Watermark]:
        if epoch not in self._marks:
            self._marks[epoch] = [Watermark() for _ in self.channels]
        return self._marks[epoch]

    def may_take(self, ticket: int) -> bool:
        """Whether the next item is within the reorder window."""
        with self._lock:
            for _, before in self._open.values():
                return self._taken - before < self._window
            return True

    def token(self, ticket: int, token: Token) -> None:
        if isinstance(token, EndOfEpoch):
            with self._lock:
                if any(epoch == token.epoch for epoch, _ in self._open.values()):
                    self._ending[token.epoch] = token
                    return
            self._end(token)
        else:
            self.stage.run.fail(token.error)  # without an order a failure ends the run at once
            raise Cancelled

    def _seq(self, item: Item) -> int:
        return item.epoch - self.stage.run.first_epoch

    def _put(self, index: int, ticket: int, item: Item, last: bool) -> bool:
        stamp = self._stamp(index, ticket, item.epoch, last)
        return self.channels[index].put_at(self._seq(item), item, False, stamp)

    def _stamp(self, index: int, ticket: int, epoch: int, last: bool) -> Callable[[object], None]:
        """A function that sets an item's cursors to the watermark at the time of its put, under the channel's lock."""
        mark = self._marks[epoch][index]

        def stamp(item: Any) -> None:
            with self._lock:
                before = mark.current()
                after = mark.finish(ticket) if last else before
            if item.__class__ is Bundle:
                item.stamp(before, after)
            else:
                item.before, item.after = before, after

        return stamp

    def _done(self, ticket: int) -> None:
        """All results of a ticket were put; its epoch may be complete now."""
        stage, ending = self.stage, None
        stage.ordinals.forget(ticket)
        with self._lock:
            epoch, _ = self._open.pop(ticket)
            for mark in self._marks.get(epoch, ()):
                mark.finish(ticket)
            if epoch in self._ending and all(epoch != each for each, _ in self._open.values()):
                ending = self._ending.pop(epoch)
        stage.inboxes[0].nudge()
        if ending is not None:
            self._end(ending)

    def _end(self, token: EndOfEpoch) -> None:
        failure = self.stage.failures.at_end(token.epoch)
        if failure is not None:
            self.stage.run.fail(failure.error)
            raise Cancelled
        with self._lock:
            self._marks.pop(token.epoch, None)
        for channel in self.channels:
            channel.put_at(self._seq(token), token, True)
