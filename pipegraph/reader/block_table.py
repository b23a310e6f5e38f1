"""Blocks in use, loaded or scheduled, and their eviction. No threads, no I/O.

The caller holds a lock around everything here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.schedule import AT_ONCE_NBYTES, DRAWN_AT_ONCE, ReadSchedule
from pipegraph.storage import ShardFile


class BlockState(StrEnum):
    """Where a block of the table stands."""

    WAITING = "waiting"  # for its loading
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class BlockEntry:
    """One block of the table. Everything but ``number`` changes under the lock.

    Attributes:
        nbytes: what it counts of the budget.
        first: the tick for which it is fetched.
        fresh: not used yet.
        awaited: a worker waits, or has waited, for it.
        pins: uses that have not ended.
        raised_at: the (epoch, step) pairs at which its error was raised.
    """

    number: int
    nbytes: int
    first: int
    fresh: bool = True
    awaited: bool = False
    state: BlockState = BlockState.WAITING
    pins: int = 0
    value: Any = None
    file: ShardFile | None = None
    error: Exception | None = None
    raised_at: set[tuple[int, Any]] = field(default_factory=set)


class BlockTable:
    """Entries by the number of their block, least recently used first.

    Attributes:
        nbytes: of all that are loaded or being loaded.
        loading: those being loaded, the one begun first comes first.
        doomed: released files, which the caller closes outside the lock.
    """

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._entries: OrderedDict[int, BlockEntry] = OrderedDict()
        self.nbytes = 0
        self.loading: list[BlockEntry] = []
        self.doomed: list[ShardFile] = []

    def get(self, number: int) -> BlockEntry | None:
        """The entry of a block, if there is one."""
        return self._entries.get(number)

    def __contains__(self, number: object) -> bool:
        return number in self._entries

    def __iter__(self) -> Iterator[BlockEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, number: int, first: int) -> BlockEntry:
        """A new entry; it takes room once its loading begins."""
        entry = self._entries[number] = BlockEntry(number, self._source.held_nbytes(number), first)
        return entry

    def use(self, entry: BlockEntry) -> None:
        """A use begins; ``entry.pins -= 1`` ends it."""
        entry.pins += 1
        self._entries.move_to_end(entry.number)

    def may_begin(self, entry: BlockEntry) -> bool:
        """Whether it has room beside what is being loaded or read; the rest can make room for it.

        Alone any block may try.
        """
        used = sum(e.nbytes for e in self._entries.values() if e.state is BlockState.READY and e.pins)
        taken = used + sum(each.nbytes for each in self.loading)
        return not self.loading or taken + entry.nbytes <= self._source.budget()

    def begin(self, entry: BlockEntry, schedule: ReadSchedule) -> None:
        """Its loading begins."""
        self.make_room(entry.nbytes, schedule)
        entry.state = BlockState.LOADING
        self.loading.append(entry)
        self.nbytes += entry.nbytes

    def grow(self, entry: BlockEntry, nbytes: int, schedule: ReadSchedule) -> None:
        """Record how many bytes the entry holds now."""
        if nbytes > entry.nbytes:
            self.nbytes += nbytes - entry.nbytes
            entry.nbytes = nbytes
        self.make_room(0, schedule)

    def loaded(self, entry: BlockEntry, schedule: ReadSchedule) -> None:
        """It is ready; its size may be known only now."""
        self.loading.remove(entry)
        nbytes = self._source.held_nbytes(entry.number)
        self.nbytes += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self.make_room(0, schedule)
        entry.state = BlockState.READY

    def failed(self, entry: BlockEntry) -> None:
        """It could not be loaded; without an error, its loading was interrupted."""
        self.loading.remove(entry)
        entry.state = BlockState.FAILED
        self.nbytes -= entry.nbytes
        entry.nbytes = 0
        if entry.error is None:
            del self._entries[entry.number]

    def make_room(self, nbytes: int, schedule: ReadSchedule) -> None:
        """Release unused blocks, the farthest next use first, until there is room.

        Blocks without a known next use go before all others, the least recently used first.
        """
        budget = self._source.budget()
        if self.nbytes + nbytes <= budget:
            return
        spare = [e for e in self._entries.values() if e.state is BlockState.READY and not e.pins]
        for entry in sorted(spare, key=lambda e: -_next_use(e, schedule)):
            self.drop(entry)
            if self.nbytes + nbytes <= budget:
                return

    def drop(self, entry: BlockEntry) -> None:
        """Remove an entry and release its block."""
        del self._entries[entry.number]
        if entry.state is not BlockState.WAITING:
            self.nbytes -= entry.nbytes
        if entry.file is not None:
            self.doomed.append(entry.file)
        entry.file = entry.value = None

    def next_start(self, schedule: ReadSchedule) -> BlockEntry | None:
        """The next block to read ahead, in the table already; None while there is no room, or enough is loading."""
        upcoming = schedule.next_upcoming(self)
        if upcoming is None:
            return None
        first, number = upcoming
        nbytes = self._source.held_nbytes(number)
        if self.loading and sum(entry.nbytes for entry in self.loading) + nbytes > AT_ONCE_NBYTES:
            return None
        # While sizes are unknown, one ahead.
        if nbytes > self.free_bytes(schedule) or (
            not nbytes and any(entry.first > schedule.tick for entry in self)
        ):
            return None
        schedule.upcoming.popleft()
        return self.add(number, first)

    def free_bytes(self, schedule: ReadSchedule) -> int:
        """Bytes that upcoming blocks may take: the budget without the blocks that are still needed."""
        entries = self._entries.values()
        needed = sum(
            entry.nbytes
            for entry in entries
            if entry.state is not BlockState.FAILED
            and (entry.pins or entry.state is not BlockState.READY or _next_use(entry, schedule) < math.inf)
        )
        return self._source.budget() - needed


def _next_use(entry: BlockEntry, schedule: ReadSchedule) -> float:
    tick = schedule.next_use(entry.number)
    if tick is None:
        # Whether its first use is still to come: later, or now, by a worker that others have overtaken.
        late = entry.fresh and entry.first >= 0 and entry.first > schedule.tick - DRAWN_AT_ONCE
        return max(entry.first, schedule.tick) if late or entry.first > schedule.tick else math.inf
    return tick
