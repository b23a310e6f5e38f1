"""What failed and was left out or replaced: the ledger of a loader, and its counts per stage and epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipegraph.chunk import Lineage

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
    """A ledger line: what is shown, and where it stands so that a state can tell whether it is past."""

    shown: Quarantined
    row: Lineage
    ordinal: int


class Ledger:
    """Thread-safe; the entries of one epoch and stage come in order where the stage is ordered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._seen: set[tuple[str, int, Lineage]] = set()
        self._base: dict[tuple[str, int], tuple[int, int]] = {}
        self._counts: dict[tuple[str, int], int] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing has failed, in this run or before."""
        return not self._entries and not self._base

    def begin(self, epoch: int, restored: bool) -> None:
        """A run begins at ``epoch``: its failures are counted anew, from the state's counts if it goes on from one."""
        with self._lock:
            if not restored:
                self._base.clear()
            self._counts = {key: failed for key, (failed, _) in self._base.items()}

    def base(self, stage: str, epoch: int) -> tuple[int, int]:
        """``(failed, items)`` of the stage's epoch before this run began."""
        with self._lock:
            return self._base.get((stage, epoch), (0, 0))

    def failed(self, stage: str, epoch: int) -> int:
        """How many of the stage's items failed in the epoch so far, earlier runs included."""
        with self._lock:
            return self._counts.get((stage, epoch), 0)

    def add(self, stage: str, epoch: int, entries: list[Entry]) -> None:
        """Record one failing item (a whole batch has an entry per sample). A replay shows nothing twice."""
        with self._lock:
            fresh = [e for e in entries if (stage, epoch, e.row) not in self._seen]
            self._counts[stage, epoch] = self._counts.get((stage, epoch), 0) + 1
            if fresh:
                self._seen.update((stage, epoch, e.row) for e in fresh)
                self._entries += fresh

    def shown(self) -> tuple[Quarantined, ...]:
        """The whole ledger."""
        with self._lock:
            return tuple(entry.shown for entry in self._entries)

    def state(self, epoch: int, past: Callable[[Entry], bool]) -> dict[str, Any]:
        """JSON: counts per stage of ``epoch`` and the latest entries, as far as they are ``past``."""
        with self._lock:
            if not self._entries and not self._base:
                return {"counts": {}, "entries": []}
            entries = [
                e for e in self._entries if e.shown.epoch < epoch or (e.shown.epoch == epoch and past(e))
            ]
            counts: dict[str, list[int]] = {}
            rows: dict[str, set[int]] = {}
            for entry in entries:
                if entry.shown.epoch == epoch:
                    rows.setdefault(entry.shown.stage, set()).add(entry.ordinal)
            for (stage, at), (failed, items) in self._base.items():
                if at == epoch:
                    counts[stage] = [failed, items]
            for stage, ordinals in rows.items():
                fresh = (
                    {o for o in ordinals if o > counts.get(stage, [0, 0])[1]} if stage in counts else ordinals
                )
                failed, items = counts.get(stage, [0, 0])
                counts[stage] = [failed + len(fresh), max([items, *fresh])]
        latest = [
            [
                e.shown.key,
                e.shown.position,
                e.shown.epoch,
                e.shown.stage,
                e.shown.error,
                list(e.row),
                e.ordinal,
            ]
            for e in entries[-STATE_ENTRIES:]
        ]
        return {"counts": counts, "entries": latest}

    def load(self, epoch: int, state: dict[str, Any]) -> None:
        """Go on from a state; forgets everything else."""
        with self._lock:
            self._entries = [
                Entry(Quarantined(_hashable(key), position, at, stage, error), _hashable(row), ordinal)
                for key, position, at, stage, error, row, ordinal in state["entries"]
            ]
            self._seen = {(e.shown.stage, e.shown.epoch, e.row) for e in self._entries}
            self._base = {
                (stage, epoch): (failed, items) for stage, (failed, items) in state["counts"].items()
            }
            self._counts = {key: failed for key, (failed, _) in self._base.items()}


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
