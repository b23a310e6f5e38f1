"""The table of blocks that are in use, loaded or on their way, and what makes room for others: no threads, no I/O.

The caller holds a lock around everything here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal, final

from pipegraph.operators.itinerary import Itinerary
from pipegraph.operators.shelves import Shelf
from pipegraph.storage import ShardFile

State = Literal["waiting", "loading", "ready", "failed"]


class Entry:
    """One block of the table. Everything but ``number`` changes under the lock.

    Attributes:
        nbytes: what it counts of the budget.
        first: the tick for which it is brought.
        asked: when its loading was asked for.
        wanted: when a worker first stood and waited for it; None if none did.
        there: when it was ready.
        fresh: not used yet.
        awaited: a worker stands and waits for it.
        pins: uses that have not ended.
        value: what samples are read from, once it is ready.
        told: the (epoch, step) that had its error.
    """

    __slots__ = (
        "asked",
        "awaited",
        "error",
        "file",
        "first",
        "fresh",
        "nbytes",
        "number",
        "pins",
        "state",
        "there",
        "told",
        "value",
        "wanted",
    )

    def __init__(self, number: int, nbytes: int, first: int, asked: float) -> None:
        self.number = number
        self.nbytes = nbytes
        self.first = first
        self.asked = asked
        self.wanted: float | None = None
        self.there = asked
        self.fresh = True
        self.awaited = False
        self.state: State = "waiting"
        self.pins = 0
        self.value: Any = None
        self.file: ShardFile | None = None
        self.error: Exception | None = None
        self.told: set[tuple[int, Any]] = set()


@final
class Held:
    """Entries by the number of their block, least recently used first.

    Attributes:
        nbytes: of all entries together.
        doomed: files that were let go of, for the caller to close outside the lock.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._most_open = shelf.most_open
        self.nbytes = 0
        self.doomed: list[ShardFile] = []

    def get(self, number: int) -> Entry | None:
        """The entry of a block, if there is one."""
        return self._entries.get(number)

    def __contains__(self, number: object) -> bool:
        return number in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, number: int, first: int, now: float, way: Itinerary) -> Entry:
        """A new entry, and room for it as far as there is any."""
        nbytes = self._shelf.held_nbytes(number)
        self.make_room(nbytes, way)
        entry = self._entries[number] = Entry(number, nbytes, first, now)
        self.nbytes += nbytes
        return entry

    def use(self, entry: Entry) -> None:
        """A use begins; ``entry.pins -= 1`` ends it."""
        entry.pins += 1
        self._entries.move_to_end(entry.number)

    def loaded(self, entry: Entry, way: Itinerary) -> None:
        """It is ready; its size may be known only now."""
        entry.state = "ready"
        nbytes = self._shelf.held_nbytes(entry.number)
        self.nbytes += nbytes - entry.nbytes
        entry.nbytes = nbytes
        self.make_room(0, way, after=entry)

    def failed(self, entry: Entry) -> None:
        """It could not be loaded; without an error, because that was broken off."""
        entry.state = "failed"
        self.nbytes -= entry.nbytes
        entry.nbytes = 0
        if entry.error is None:
            del self._entries[entry.number]

    def make_room(self, nbytes: int, way: Itinerary, after: Entry | None = None) -> None:
        """Let go of blocks that nobody reads: those of no known further use first, then the least recently used.

        Args:
            after: a block that turned out to be larger than thought; it stays, and so do those that are needed.
        """
        budget = self._shelf.budget()
        for spare_needed in (True, False) if after is None else (True,):
            # What lies in the node cache is opened again at once, and while it is open it cannot be evicted, even
            # where the plan wants its place for another: what is not needed soon is closed.
            closes_all = spare_needed and self._shelf.keeps and way.scanned > way.tick
            for entry in list(self._entries.values()):
                if not closes_all and self.nbytes + nbytes <= budget and len(self._entries) < self._most_open:
                    return
                if entry.state == "ready" and not entry.pins and not (spare_needed and _needed(entry, way)):
                    self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Let go of an entry."""
        del self._entries[entry.number]
        self.nbytes -= entry.nbytes
        if entry.file is not None:
            self.doomed.append(entry.file)
        entry.file = entry.value = None

    def free_bytes(self, way: Itinerary) -> int:
        """What blocks to come may take: all that is not held by blocks that are still needed."""
        entries = self._entries.values()
        if len(entries) >= self._most_open and all(_needed(entry, way) for entry in entries):
            return 0
        needed = sum(
            entry.nbytes
            for entry in entries
            if entry.state != "failed" and (entry.pins or entry.state != "ready" or _needed(entry, way))
        )
        return self._shelf.budget() - needed


def _needed(entry: Entry, way: Itinerary) -> bool:
    return way.needs(entry.number) or entry.first > way.tick
