"""The number of each item within its stage and epoch, from 1: what budgets are judged by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch
from pipegraph.contracts import Source

if TYPE_CHECKING:
    from pipegraph.engine.stage.stage_run import StageRun, Worker


class Ordinals:
    """Of one stage in one run. ``number`` is called in the order of items; the rest by any worker."""

    def __init__(self, stage: StageRun) -> None:
        self._stage = stage
        by_name = {each.name: each for each in (stage.plan, *stage.plan.followers)}
        self._name = stage.plan.judged
        self._operator = by_name[self._name].operator
        self._before: dict[int, int] = {}  # per ticket, the items before its own
        self._count = 0
        self._epoch = -1
        self._totals: dict[int, int] = {}  # of epochs that have come to their end, until that is judged

    def number(self, ticket: int, item: Any) -> None:
        """An item comes in under this ticket."""
        if item.__class__ is EndOfEpoch:
            self._turn_to(item.epoch)
            self._totals[item.epoch] = self._count
            return
        if not isinstance(item, Chunk):
            return
        self._turn_to(item.epoch)
        if isinstance(self._operator, Source):
            self._count = item.after  # steps say it all
            return
        self._before[ticket] = self._count
        stage = self._stage
        if item.__class__ is Bundle:
            stage.run.ledger.took(self._name, item.epoch, item.befores(), self._count + 1)
            self._count += len(item.lineages)
            return
        self._count += len(item.lineages) if self._operator.per_sample else 1
        stage.run.ledger.took(self._name, item.epoch, (item.before,), self._count)

    def _turn_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._count = self._stage.run.ledger.items_before(self._name, epoch)

    def of(self, ticket: int, chunk: Chunk, row: int = 0) -> int:
        """The ordinal of an item, or of a row of it."""
        if isinstance(self._operator, Source):
            return int(chunk.before) + 1
        return self._before.get(ticket, 0) + row + 1

    def forget(self, ticket: int) -> None:
        """A ticket is done."""
        self._before.pop(ticket, None)

    def total(self, epoch: int) -> int:
        """All items of an epoch that has come to its end."""
        return self._totals.pop(epoch, 0)


def number_item(stage: StageRun, worker: Worker, item: Any) -> None:
    """The ordinal of an item, for a stage that has a budget and a single worker that does not ``take``."""
    if stage.budgeted:
        stage.ordinals.forget(worker.ticket)
        worker.ticket += 1
        stage.ordinals.number(worker.ticket, item)
