"""What a worker takes before it has done what it has, so that its process or actor has the next item at hand.

Between two answers a process would wait for the trainer, whose interpreter may be busy with training: with two items
in flight it does not. An item taken ahead has its ticket, and its memory, as any other; it is next in any case, also
for a worker that leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

from pipegraph.bundle import Bundle
from pipegraph.engine.process.contract import Call
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage_worker import Worker

QUICK_NS = 100_000_000
"""Items that come at longer intervals are not taken ahead: the wait is short beside them, and whoever is idle at the
end of an epoch would miss them."""

FAR = 10
"""A Ray actor may be so many times slower: the way there takes that much longer, and other machines' networks."""

Taken = tuple[int, Any, int | None]
"""Ticket, item and the bytes reserved for it, if any have been."""


class Ahead:
    """See the module docstring. Used by its worker alone.

    Args:
        rows: how many of a bundle to take; None: as it comes.
        call: the call that will be made for an item; None where that is not known beforehand.
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
        self._quick_ns = QUICK_NS * (FAR if stage.plan.backend == "ray" else 1)
        self._taken: Taken | None = None
        self._asked_ns = 0

    @property
    def holds(self) -> bool:
        """Whether there is such an item."""
        return self._taken is not None

    def take(self) -> Taken | None:
        """The item taken ahead, which is next now."""
        taken, self._taken = self._taken, None
        return taken

    def __call__(self) -> Call | None:
        """Take an item, if there is one to spare; see ``contract.Host.ahead``."""
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
        ticket, item = found
        self._taken = ticket, item, None
        granted: int | None = 0
        if stage.account.guarded:
            count = len(item.lineages) if item.__class__ is Bundle else 1
            granted = stage.run.account.try_reserve(stage.account, count, stage.sender.first, ticket)
        if granted is None:
            return None
        self._taken = ticket, item, granted
        with suppress(Exception):  # of a sampler: raised again when its turn has come
            return self._call(item)
        return None
