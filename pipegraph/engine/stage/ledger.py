"""The ledger of skipped and replaced samples: a loader's quarantine, and its error budgets per stage and epoch; and the
numbers of a stage's items, which these budgets count."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from pipegraph import concurrency
from pipegraph.bundle import Bundle
from pipegraph.capabilities import RowOperator
from pipegraph.chunk import Chunk, Cursor, EndOfEpoch, Lineage
from pipegraph.errors import shown
from pipegraph.planning.plan import StagePlan

if TYPE_CHECKING:
    from pipegraph.engine.stage.budgets import Book, Entry, Quarantined

STATE_ENTRIES = 64
"""The number of latest entries in a state; its counts cover all."""

KEPT = 1_000
"""The number of latest entries in the quarantine; its count covers all. An entry takes up to 670 bytes."""

_number = attrgetter("number")


class Ledger:
    """The ledger of a loader. Thread-safe. Holds two kinds of records with different lifetimes:

    * the *quarantine*, shown by the profile: the count of all samples left out in the whole run, and the last of them;
    * a *book* per stage and epoch, which checks the budget and ends with its epoch.

    A state is made from the books of its epoch and the last entries of earlier ones; making it visits no other records.

    Args:
        unordered: the stages whose items come in completion order, where ordinals do not identify items.
    """

    def __init__(self, unordered: Collection[str] = ()) -> None:
        # Reentrant, and every change below keeps the data readable at each step: a signal handler may take a state
        # while its thread is in here.
        self._lock = concurrency.RLock()
        self._unordered = frozenset(unordered)
        self._quarantine: dict[tuple[Any, ...], Entry] = {}  # the last KEPT
        self._count = 0
        self._forgotten: Counter[tuple[str, int]] = (
            Counter()
        )  # by stage and epoch: entries that made room for later ones
        self._repeats: Counter[tuple[str, int]] = (
            Counter()
        )  # of these, how many may still come again in this run
        self._numbers = count()
        self._past: deque[Entry] = deque(maxlen=STATE_ENTRIES)  # from books that have ended
        self._books: dict[tuple[str, int], Book] = {}
        self._base: dict[tuple[str, int], tuple[int, int]] = {}  # counts from a state: (failed, items)
        self._epoch = 0  # of the current or the last pass
        self._reported: set[str] = set()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to report, of this run or before."""
        return not self._quarantine and not self._base and not self._books

    @property
    def base(self) -> dict[tuple[str, int], tuple[int, int]]:
        """The counts with which a run begins: ``(failed, items)`` by stage and epoch."""
        with self._lock:
            return dict(self._base)

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may have held."""
        self._lock = concurrency.RLock()

    # -- books ---------------------------------------------------------------------------------

    def begin(self, epoch: int, restored: bool, delivered: bool = True) -> None:
        """Begin a run at ``epoch``: counts restart, from those of the state if the run was ``restored``.

        Discards the books of epochs that were only prefetched, of the last pass's epoch if it has not ``delivered``
        anything, and of epochs that this run repeats.
        """
        with self._lock:
            if not restored:
                self._base.clear()
            since = self._epoch if delivered else self._epoch - 1
            void = {of for of in self._epochs() if of > since or (restored and of >= epoch)}
            for (stage, of), book in self._books.items():
                if of in void:
                    self._take_back(stage, of, book)
            self._end(self._epochs() - void)
            self._books.clear()
            self._repeats = self._forgotten.copy()

    def _take_back(self, stage: str, epoch: int, book: Book) -> None:
        """Remove what this book has added to the quarantine."""
        own = [
            key
            for key, entry in self._quarantine.items()
            if key[:2] == (stage, epoch) and entry.number >= book.since
        ]
        for key in own:
            del self._quarantine[key]
        self._count -= book.added
        self._forgotten[stage, epoch] -= book.added - len(own)

    def enter(self, epoch: int) -> None:
        """Begin a pass over ``epoch``: the books of earlier epochs end."""
        with self._lock:
            self._epoch = epoch
            self._end({of for of in self._epochs() if of < epoch})

    def take_over(self, epoch: int) -> None:
        """Continue with another rank's part of the same epoch, whose cursors start over.

        Counts continue, except those of sources: their items are the steps of a part, so each part is checked by
        itself.
        """
        with self._lock:
            self._base = {
                key: (book.failed, book.items)
                for key, book in self._books.items()
                if key[1] == epoch and book.items
            }
            self._end({epoch})

    def _epochs(self) -> set[int]:
        return {of for _, of in self._books}

    def _end(self, epochs: set[int]) -> None:
        ended = [key for key in self._books if key[1] in epochs]
        last = [entry for key in ended for entry in self._books[key].latest(STATE_ENTRIES)]
        self._past.extend(sorted(last, key=_number))
        for key in ended:
            del self._books[key]

    def _book(self, stage: str, epoch: int) -> Book:
        book = self._books.get((stage, epoch))
        if book is None:
            from pipegraph.engine.stage.budgets import Book  # for stages with a policy only

            book = Book(*self._base.get((stage, epoch), (0, 0)), next(self._numbers))
            self._books[stage, epoch] = book
        return book

    # -- called by stages -----------------------------------------------------------------------

    def items_before(self, stage: str, epoch: int) -> int:
        """How many items of the epoch the stage had taken in earlier runs."""
        with self._lock:
            return self._base.get((stage, epoch), (0, 0))[1]

    def took(self, stage: str, epoch: int, befores: Sequence[Cursor], first: int) -> None:
        """Record that items ``first``, ``first`` + 1, ... of the epoch came in at these cursors."""
        with self._lock:
            self._book(stage, epoch).take(befores, first)

    def failed(self, stage: str, epoch: int) -> tuple[int, int]:
        """How many of the stage's items failed in the epoch so far, including earlier runs; the ordinal of the last of
        them in this run, 0 if there is none."""
        with self._lock:
            book = self._books.get((stage, epoch))
            if book is None:
                return self._base.get((stage, epoch), (0, 0))[0], 0
            return book.failed, book.last_failed

    def add(self, stage: str, epoch: int, ordinal: int, lost: Sequence[tuple[Lineage, Quarantined]]) -> bool:
        """Record a failed item (a batch has an entry per sample); returns whether it is the stage's first.

        A replayed item does not appear twice. In ordered stages a sample with another ordinal is another item: it came
        through another branch.
        """
        from pipegraph.engine.stage.budgets import Entry

        with self._lock:
            book = self._book(stage, epoch)
            entries = []
            for row, quarantined in lost:
                key = (stage, epoch, row, 0 if stage in self._unordered else ordinal)
                known = self._quarantine.get(key)
                if known is not None:
                    entry = Entry(known.shown, row, ordinal, known.number)
                else:
                    entry = Entry(quarantined, row, ordinal, next(self._numbers))
                    if self._repeats[stage, epoch] > 0:  # the same epoch again: it was counted then
                        self._repeats[stage, epoch] -= 1
                    else:
                        book.added += 1
                        self._keep(key, entry)
                entries.append(entry)
            book.add(ordinal, entries)
            first = stage not in self._reported
            self._reported.add(stage)
            return first

    def _keep(self, key: tuple[Any, ...], entry: Entry) -> None:
        self._quarantine[key] = entry
        self._count += 1
        if len(self._quarantine) > KEPT:
            stage, epoch, *_ = oldest = next(iter(self._quarantine))
            del self._quarantine[oldest]
            self._forgotten[stage, epoch] += 1

    def shown(self) -> tuple[tuple[Quarantined, ...], int]:
        """The last entries of the quarantine, and the number of all."""
        with self._lock:
            return tuple([entry.shown for entry in self._quarantine.values()]), self._count

    # -- states --------------------------------------------------------------------------------

    def prune(self, epoch: int, at: Callable[[str], Cursor]) -> None:
        """Drop the cursors of items before ``at(stage)``, where the stage's input would restart now."""
        with self._lock:
            for (stage, of), book in self._books.items():
                if of == epoch:
                    book.prune(at(stage), STATE_ENTRIES)

    def state(self, epoch: int, at: Callable[[str], Cursor], sources: Mapping[str, int]) -> list[Any]:
        """``[[[stage, failed, items], ...], latest entries, number of all]`` for the items before the cursors.

        Args:
            at: maps a stage's name to the cursor at which its input would restart.
            sources: the step at which each source would restart.
        """
        with self._lock:
            found, number = list(self._past), self._count
            counts = {
                stage: [stage, failed, sources.get(stage, items)]
                for (stage, of), (failed, items) in self._base.items()
                if of == epoch
            }
            for (stage, of), book in self._books.items():
                if of == epoch:
                    items = sources[stage] if stage in sources else book.passed(at(stage))
                    counts[stage] = [stage, book.failed_of(items), items]
                    found += book.latest(STATE_ENTRIES, items)
                    number -= min(book.added, book.behind(items))
                elif of < epoch:
                    found += book.latest(STATE_ENTRIES)
                else:
                    number -= book.added
        latest = sorted({entry.number: entry for entry in found}.values(), key=_number)[-STATE_ENTRIES:]
        # Without those of which nothing counts: whether a stage has read ahead into the epoch is chance.
        lines = [line for _, line in sorted(counts.items()) if any(line[1:])]
        return [lines, [_line(entry) for entry in latest], number]

    def load(self, epoch: int, state: Any) -> None:
        """Resume from a state; drops everything else."""
        from pipegraph.engine.stage.budgets import Entry, Quarantined

        counts, lines, *number = state
        with self._lock:
            self._quarantine.clear()
            self._forgotten.clear()
            self._repeats.clear()
            self._count = 0
            self._past.clear()
            self._books.clear()
            self._base = {(stage, epoch): (failed, items) for stage, failed, items in counts}
            for key, position, of, stage, error, row, ordinal in lines:
                entry = Entry(
                    Quarantined(_hashable(key), position, of, stage, error),
                    _hashable(row),
                    ordinal,
                    next(self._numbers),
                )
                self._past.append(entry)
                own = 0 if stage in self._unordered else ordinal
                self._keep((stage, of, entry.row, own), entry)
            self._count = max([self._count, *number])


class Ordinals:
    """The numbers of the items of one stage in one run, from 1 in each epoch. ``number`` is called in item order; the
    rest by any worker."""

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


def _line(entry: Entry) -> list[Any]:
    of = entry.shown
    return [_plain(of.key), of.position, of.epoch, of.stage, of.error, list(entry.row), entry.ordinal]


def _plain(key: Any) -> Any:
    """A sample's key as a JSON value, or as text if JSON has no such value."""
    if key is None or isinstance(key, str | bool | int | float):
        return key
    if isinstance(key, np.generic):
        return _plain(key.item())
    if isinstance(key, list | tuple):
        return [_plain(each) for each in key]
    try:
        return str(key)
    except Exception:
        return shown(key)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
