"""The ledger of skipped samples: how many, and the last of them; and the failures of each stage that budgets count."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from pipegraph import concurrency
from pipegraph.chunk import Chunk, Cursor
from pipegraph.engine.stage.cursors import compare
from pipegraph.errors import shown

STATE_ENTRIES = 64
"""The number of latest entries in a state; its count covers all."""

KEPT = 1_000
"""The number of latest entries in the profile; its count covers all. An entry takes up to 670 bytes."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One sample that was left out."""

    key: Any
    position: int
    epoch: int
    stage: str
    error: str


class Pending(NamedTuple):
    """A sample that was left out, the cursor of its item, and the entry's number."""

    lost: Quarantined
    at: Cursor
    number: int


_place = cmp_to_key(compare)
_number = attrgetter("number")


class Ledger:
    """The ledger of a loader. Thread-safe.

    An entry is pending until an item behind its own has been delivered: a resume meets its item again, so a state
    leaves it out.
    """

    def __init__(self) -> None:
        # Reentrant, and every change below is one step: a signal handler may take a state while its thread is in here.
        self._lock = concurrency.RLock()
        # How many were left out before those pending, the last of them, and those pending by stage and epoch, in order.
        self._records: tuple[int, list[Quarantined], dict[tuple[str, int], list[Pending]]] = 0, [], {}
        self._failed: dict[
            tuple[str, int], tuple[int, int]
        ] = {}  # by stage and epoch: failures, the last one's number
        self._numbers = itertools.count()
        self._epoch = 0  # of the current or the last pass
        self._reported: set[str] = set()
        self.resumed_without: int | None = None
        """The epoch of the state that was loaded, if samples of it had been left out."""

    def forked(self) -> None:
        """In a forked child: replace the lock, which a thread of the parent may have held."""
        self._lock = concurrency.RLock()

    # -- runs and passes -------------------------------------------------------------------------

    def begin(self, delivered: bool = True) -> None:
        """Begin a run: budgets count anew. What failed in epochs that were only prefetched did not happen, nor in the
        last pass's if it has ``delivered`` nothing."""
        with self._lock:
            self._settle(self._epoch + 1 if delivered else self._epoch, {})
            self._records = (*self._records[:2], {})
            self._failed.clear()

    def enter(self, epoch: int) -> None:
        """Begin a pass over ``epoch``: earlier ones are over."""
        with self._lock:
            self._epoch = epoch
            self._settle(epoch, {})
            self._failed = {key: found for key, found in self._failed.items() if key[1] >= epoch}

    def _settle(self, epoch: int, at: Mapping[str, Cursor]) -> None:
        """Entries of earlier epochs, and those of ``epoch`` before ``at[stage]``, are no longer pending."""
        count, _, pending = self._records
        ends = self._ends(epoch, at)
        if not any(ends.values()):
            return
        left = {key: found for key, each in pending.items() if (found := each[ends[key] :])}
        self._records = count + sum(ends.values()), self._last(KEPT, ends), left

    def _ends(self, epoch: int, at: Mapping[str, Cursor]) -> dict[tuple[str, int], int]:
        """How many of the pending entries of each stage and epoch lie before there."""
        return {
            (stage, of): len(each)
            if of < epoch
            else bisect_left(each, _place(at.get(stage)), key=lambda entry: _place(entry.at))
            if of == epoch
            else 0
            for (stage, of), each in self._records[2].items()
        }

    def _last(self, kept: int, ends: Mapping[tuple[str, int], int]) -> list[Quarantined]:
        """The last entries, up to these pending ones."""
        _, last, pending = self._records
        found = [each for key, end in ends.items() for each in pending[key][max(0, end - kept) : end]]
        return [*last[-kept:], *(each.lost for each in sorted(found, key=_number))][-kept:]

    # -- called by stages -----------------------------------------------------------------------

    def failed(self, stage: str, epoch: int) -> tuple[int, int]:
        """How many of the stage's items failed in the epoch since the start; the largest of their numbers, or 0."""
        with self._lock:
            return self._failed.get((stage, epoch), (0, 0))

    def add(self, stage: str, ordinal: int, item: Chunk, error: str) -> Sequence[Quarantined] | None:
        """Record a failed item (a batch has an entry per sample); returns its entries if it is the stage's first."""
        lost = [
            Quarantined(key, row[1], item.epoch, stage, error)
            for key, row in zip(item.keys, item.lineages, strict=True)
        ]
        key = stage, item.epoch
        with self._lock:
            failed, last = self._failed.get(key, (0, 0))
            self._failed[key] = failed + 1, max(last, ordinal)
            pending = self._records[2].setdefault(key, [])
            for each in lost:  # completion-order stages add items a little out of order
                insort(
                    pending,
                    Pending(each, item.before, next(self._numbers)),
                    key=lambda entry: _place(entry.at),
                )
            first = stage not in self._reported
            self._reported.add(stage)
            return lost if first else None

    def shown(self) -> tuple[tuple[Quarantined, ...], int]:
        """The last entries, and the number of all."""
        with self._lock:
            ends = {key: len(each) for key, each in self._records[2].items()}
            return tuple(self._last(KEPT, ends)), self._records[0] + sum(ends.values())

    # -- states --------------------------------------------------------------------------------

    def prune(self, epoch: int, at: Mapping[str, Cursor]) -> None:
        """Settle the entries before ``at[stage]``, where the stage's input would restart now."""
        with self._lock:
            self._settle(epoch, at)

    def state(self, epoch: int, at: Mapping[str, Cursor]) -> list[object]:
        """``[number of all, latest entries]`` of the items before ``at[stage]``, where its input would restart."""
        with self._lock:
            ends = self._ends(epoch, at)
            count, latest = self._records[0] + sum(ends.values()), self._last(STATE_ENTRIES, ends)
        return [count, [[_plain(of.key), of.position, of.epoch, of.stage, of.error] for of in latest]]

    def load(self, epoch: int, state: Any) -> None:
        """Resume from a state; drops everything else."""
        count, lines = state
        entries = [Quarantined(_hashable(key), *rest) for key, *rest in lines]
        with self._lock:
            self._records = count, entries, {}
            self._failed.clear()
            self.resumed_without = epoch if any(each.epoch == epoch for each in entries) else None


def _plain(key: object) -> object:
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


def _hashable(value: object) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
