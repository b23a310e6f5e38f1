"""Numbers the items of a stage within each epoch, from 1, for its error budget."""

from __future__ import annotations

from typing import Any

from pipegraph.bundle import Bundle
from pipegraph.capabilities import RowOperator
from pipegraph.chunk import Chunk, EndOfEpoch
from pipegraph.engine.stage.ledger import Ledger
from pipegraph.planning.plan import StagePlan


class Ordinals:
    """The item numbers of one stage in one run. ``number`` is called in item order; the rest by any worker."""

    def __init__(self, plan: StagePlan, ledger: Ledger) -> None:
        self._ledger = ledger
        by_name = {each.name: each for each in (plan, *plan.followers)}
        self._name = plan.judged
        judged = by_name[self._name]
        self._steps = judged.source is not None  # a source's items are its steps
        self._per_sample = judged.operator.can(RowOperator) is not None
        self._before: dict[int, int] = {}  # per ticket, the items before its own
        self._count = 0
        self._epoch = -1
        self._totals: dict[int, int] = {}  # of epochs that have come to their end, until that is judged

    def number(self, ticket: int, item: Any) -> None:
        """Number the item that was taken with this ticket."""
        if item.__class__ is EndOfEpoch:
            self._turn_to(item.epoch)
            self._totals[item.epoch] = self._count
            return
        if not isinstance(item, Chunk):
            return
        self._turn_to(item.epoch)
        if self._steps:
            self._count = item.after
            return
        self._before[ticket] = self._count
        if item.__class__ is Bundle:
            self._ledger.took(self._name, item.epoch, item.befores(), self._count + 1)
            self._count += len(item.lineages)
            return
        self._count += len(item.lineages) if self._per_sample else 1
        self._ledger.took(self._name, item.epoch, (item.before,), self._count)

    def _turn_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._count = self._ledger.items_before(self._name, epoch)

    def of(self, ticket: int, chunk: Chunk, row: int = 0) -> int:
        """The number of an item, or of a row of it."""
        if self._steps:
            return int(chunk.before) + 1
        return self._before.get(ticket, 0) + row + 1

    def forget(self, ticket: int) -> None:
        """Drop the record of a finished ticket."""
        self._before.pop(ticket, None)

    def total(self, epoch: int) -> int:
        """The number of items of an epoch whose end was read; can be called once."""
        return self._totals.pop(epoch, 0)
