"""What failed and was left out or replaced: the ledger of a loader, and its counts per stage and epoch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipegraph.chunk import Cursor, Lineage
from pipegraph.errors import shown
from pipegraph.stage.cursors import earlier

STATE_ENTRIES = 64
"""So many of the latest entries go into a state; the counts cover all."""


@dataclass(frozen=True)
class Quarantined:
    """One sample that was left out or replaced."""

    key: Any
    position: int
    epoch: int
    stage: str
    error: str


@dataclass(frozen=True)
class Entry:
    """A ledger line: what is shown, and which item of its stage's epoch it was, counted from 1."""

    shown: Quarantined
    row: Lineage
    ordinal: int


class Ledger:
    """Thread-safe; the entries of one epoch and stage come in order where the stage is ordered.

    Budgets count items, and a run that goes on from a state must count as the one before would have. So
    stages with a budget also note at which cursor each of their items came in; from that follows how many
    items, and which failures, lie before the cursor of what was delivered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._seen: set[tuple[str, int, Lineage, int]] = set()
        self._base: dict[tuple[str, int], tuple[int, int]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._taken: dict[tuple[str, int], deque[tuple[Cursor, int]]] = {}
        self._passed: dict[tuple[str, int], int] = {}

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell, of this run or before."""
        return not self._entries and not self._base and not self._taken

    def begin(self, epoch: int, restored: bool) -> None:
        """A run begins at ``epoch``: what fails is counted anew, from the state's counts if it goes on from one."""
        with self._lock:
            if not restored:
                self._base.clear()
                self._keep([entry for entry in self._entries if entry.shown.epoch < epoch])
            self._counts = {key: failed for key, (failed, _) in self._base.items()}
            self._passed = {key: items for key, (_, items) in self._base.items()}
            self._taken.clear()

    def _keep(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._seen = {
            (e.shown.stage, e.shown.epoch, e.row, ordinal) for e in entries for ordinal in (e.ordinal, 0)
        }

    def base(self, stage: str, epoch: int) -> tuple[int, int]:
        """``(failed, items)`` of the stage's epoch before this run began."""
        with self._lock:
            return self._base.get((stage, epoch), (0, 0))

    def took(self, stage: str, epoch: int, before: Cursor, items: int) -> None:
        """With the item that came in at cursor ``before`` the stage has taken ``items`` of the epoch."""
        with self._lock:
            self._taken.setdefault((stage, epoch), deque()).append((before, items))

    def failed(self, stage: str, epoch: int) -> int:
        """How many of the stage's items failed in the epoch so far, earlier runs included."""
        with self._lock:
            return self._counts.get((stage, epoch), 0)

    def add(self, stage: str, epoch: int, entries: list[Entry], ordered: bool = True) -> None:
        """Record one failing item (a whole batch has an entry per sample). A replay shows nothing twice.

        In order the same sample under another ordinal is another item: it came by another way.
        """
        with self._lock:
            keys = [(stage, epoch, e.row, e.ordinal if ordered else 0) for e in entries]
            self._counts[stage, epoch] = self._counts.get((stage, epoch), 0) + 1
            self._entries += [e for e, key in zip(entries, keys, strict=True) if key not in self._seen]
            self._seen.update(keys)

    def shown(self) -> tuple[Quarantined, ...]:
        """The whole ledger."""
        with self._lock:
            return tuple(entry.shown for entry in self._entries)

    def prune(self, epoch: int, at: Callable[[str], Cursor]) -> None:
        """Forget the cursors of items before ``at(stage)``, where the stage's input would restart now."""
        with self._lock:
            for stage, each in list(self._taken):
                if each < epoch:
                    del self._taken[stage, each]
                elif each == epoch:
                    self._advance(stage, epoch, at(stage))

    def _advance(self, stage: str, epoch: int, cursor: Cursor) -> int:
        """How many items of the stage came in before ``cursor``."""
        taken = self._taken.get((stage, epoch), deque())
        while taken and earlier(taken[0][0], cursor):
            self._passed[stage, epoch] = taken.popleft()[1]
        return self._passed.get((stage, epoch), 0)

    def state(self, epoch: int, at: Callable[[str], Cursor], sources: Mapping[str, int]) -> list[Any]:
        """``[[[stage, failed, items], ...], latest entries]`` of what lies before the cursors.

        Args:
            at: a stage's name to the cursor at which its input would restart.
            sources: the step at which each source would restart.
        """
        with self._lock:
            stages = {stage for stage, each in (*self._taken, *self._base) if each == epoch}
            stages |= {entry.shown.stage for entry in self._entries if entry.shown.epoch == epoch}
            items = {
                stage: sources[stage] if stage in sources else self._advance(stage, epoch, at(stage))
                for stage in sorted(stages)
            }
            past = [
                e
                for e in self._entries
                if e.shown.epoch < epoch
                or (e.shown.epoch == epoch and e.ordinal <= items.get(e.shown.stage, 0))
            ]
            counts = []
            for stage, number in items.items():
                failed, before = self._base.get((stage, epoch), (0, 0))
                fresh = {e.ordinal for e in past if e.shown.epoch == epoch and e.shown.stage == stage}
                counts.append([stage, failed + len({o for o in fresh if o > before}), number])
        latest = [
            [
                _plain(e.shown.key),
                e.shown.position,
                e.shown.epoch,
                e.shown.stage,
                e.shown.error,
                list(e.row),
                e.ordinal,
            ]
            for e in past[-STATE_ENTRIES:]
        ]
        return [counts, latest]

    def load(self, epoch: int, state: Any) -> None:
        """Go on from a state; forgets everything else."""
        counts, entries = state
        with self._lock:
            self._keep(
                [
                    Entry(Quarantined(_hashable(key), position, at, stage, error), _hashable(row), ordinal)
                    for key, position, at, stage, error, row, ordinal in entries
                ]
            )
            self._base = {(stage, epoch): (failed, items) for stage, failed, items in counts}
            self._taken.clear()


def _plain(key: Any) -> Any:
    """A sample's key as JSON knows it; what it does not know becomes text."""
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
