"""Error budgets: when one is exceeded, and the numbers of a stage's items, which a share counts."""

from __future__ import annotations

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch
from pipegraph.planning.plan import StagePlan

SHARE_COUNTS_AFTER = 100
"""A budget given as a share is not judged before this many items, but at the epoch's end: 1 bad of the first 3 is no
rate, 1 bad of all 3 is."""


def is_share(budget: int | float | None) -> bool:
    """Whether a budget is a share of the items, and not a number of them."""
    return isinstance(budget, float) and budget > 0


def exceeded(budget: int | float | None, failed: int, items: int) -> bool:
    """Whether ``failed`` of ``items`` (this failure included) is more than the budget allows."""
    if budget is None:
        return False
    if is_share(budget):
        return items >= SHARE_COUNTS_AFTER and failed / items > budget
    return failed > budget


class Ordinals:
    """The numbers of the items of one stage in one run, from 1 in each epoch. ``number`` is called in item order; the
    rest by any worker."""

    def __init__(self, plan: StagePlan) -> None:
        self._per_sample = plan.kind.judges_rows
        self._before: dict[int, int] = {}  # per ticket, the items before its own
        self._count = 0
        self._epoch = -1
        self._totals: dict[int, int] = {}  # of epochs that have come to their end, until that is judged

    def number(self, ticket: int, item: object) -> None:
        """Number the item that was taken with this ticket."""
        if item.__class__ is EndOfEpoch:
            self._turn_to(item.epoch)
            self._totals[item.epoch] = self._count
        elif isinstance(item, Chunk):
            self._turn_to(item.epoch)
            self._before[ticket] = self._count
            several = item.__class__ is Bundle or self._per_sample
            self._count += len(item.lineages) if several else 1

    def _turn_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._count = epoch, 0

    def of(self, ticket: int, row: int = 0) -> int:
        """The number of an item, or of a row of it."""
        return self._before.get(ticket, 0) + row + 1

    def forget(self, ticket: int) -> None:
        """Drop the record of a finished ticket."""
        self._before.pop(ticket, None)

    def total(self, epoch: int) -> int:
        """The number of items of an epoch whose end was read; can be called once."""
        return self._totals.pop(epoch, 0)
