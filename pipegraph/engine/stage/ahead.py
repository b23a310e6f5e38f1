"""Look-ahead of a worker: it takes its next item early, so that its process or actor always has one queued.

With one item in flight a process would wait, after each answer, for the trainer, whose interpreter may be busy with
training; with two it does not. An item taken ahead has its ticket like any other. The worker does it next in any
case, even if it is to leave.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Item
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker

QUICK_NS = 10_000_000
"""Items at longer intervals, times the cost of a call, are not taken ahead: the wait is short compared to them, and at
the end of an epoch idle workers should get them."""

NextItem = tuple[int, Item]
"""Ticket and item."""


class Ahead:
    """See the module docstring. Used by its worker alone.

    Args:
        begin: sends an item that will be done after the one in work.
        bundles: whether bundles are done as a whole; if not, their rows are sent as they are done.
    """

    def __init__(
        self, stage: StageRun, worker: Worker, begin: Callable[[Chunk], None], bundles: bool
    ) -> None:
        self._inbox = stage.inboxes[0]
        self._worker = worker
        self._begin = begin
        self._bundles = bundles
        self._quick_ns = QUICK_NS * stage.plan.backend.call_cost
        self._rows: int | None = None
        self._taken: NextItem | None = None
        self._asked_ns = 0

    @property
    def holds(self) -> bool:
        """Whether an item was taken ahead."""
        return self._taken is not None

    def take(self, rows: int | None) -> NextItem:
        """The next item; ``rows`` as for ``Channel.take``."""
        taken, self._taken, self._rows = self._taken, None, rows
        return self._inbox.take(rows) if taken is None else taken

    def look(self) -> None:
        """Take and send the item after the one in work, if there is one to spare."""
        now, last = perf_counter_ns(), self._asked_ns
        self._asked_ns = now
        if self._taken is not None or now - last > self._quick_ns or self._worker.leaves:
            return
        self._taken = self._inbox.take_ahead(self._rows)
        item = None if self._taken is None else self._taken[1]
        if isinstance(item, Chunk) and (self._bundles or not isinstance(item, Bundle)):
            with suppress(Exception):  # of a sampler: raised again when the item's turn comes
                self._begin(item)
