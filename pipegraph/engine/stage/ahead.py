"""Look-ahead of a worker: it takes its next item early, so that its process or actor always has one queued.

With one item in flight a process would wait, after each answer, for the trainer, whose interpreter may be busy with
training; with two it does not. An item taken ahead has its ticket like any other. The worker does it next in any
case, even if it is to leave.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker

if TYPE_CHECKING:
    from pipegraph.engine.remote.contract import Call

QUICK_NS = 10_000_000
"""Items at longer intervals, times the cost of a call, are not taken ahead: the wait is short compared to them, and at
the end of an epoch idle workers should get them."""

NextItem = tuple[int, Any]
"""Ticket and item."""


class Ahead:
    """See the module docstring. Used by its worker alone.

    Args:
        rows: returns how many rows of a bundle to take; None: whole bundles.
        call: returns the call that will be made for an item; None if it is not known yet.
    """

    def __init__(
        self,
        stage: StageRun,
        worker: Worker,
        rows: Callable[[], int] | None,
        call: Callable[[Any], Call | None],
    ) -> None:
        self._stage = stage
        self._worker = worker
        self._rows = rows
        self._call = call
        self._quick_ns = QUICK_NS * stage.plan.backend.call_cost
        self._taken: NextItem | None = None
        self._asked_ns = 0

    @property
    def holds(self) -> bool:
        """Whether an item was taken ahead."""
        return self._taken is not None

    def take(self) -> NextItem:
        """Remove and return the item taken ahead; only if it ``holds`` one."""
        taken, self._taken = self._taken, None
        assert taken is not None
        return taken

    def __call__(self) -> Call | None:
        """Take an item, if there is one to spare; see ``Host.ahead``."""
        if self._taken is not None:
            return None
        now, last = perf_counter_ns(), self._asked_ns
        self._asked_ns = now
        if now - last > self._quick_ns or self._worker.leaves:
            return None
        stage = self._stage
        found = stage.inboxes[0].take_ahead(None if self._rows is None else self._rows())
        if found is None:
            return None
        self._taken = found
        with suppress(Exception):  # of a sampler: raised again when the item's turn comes
            return self._call(found[1])
        return None
