"""Which cache entry goes first: pure functions over facts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

NextUse = Callable[[str], float]
"""Steps until an entry is used next; ``math.inf`` if never or unknown."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file in a cache folder, as found there.

    Args:
        name: of the entry.
        nbytes: on disk.
        used_ns: when it was opened last, by the wall clock.
        sole: it exists nowhere else.
    """

    name: str
    nbytes: int
    used_ns: int
    sole: bool = False


def eviction_order(
    entries: Iterable[CacheEntry], next_use: NextUse, incoming: float = 0.0
) -> list[CacheEntry]:
    """The entries that may go, first to go first.

    The one whose next use lies farthest ahead goes first (Belady, "A study of
    replacement algorithms for a virtual-storage computer", 1966: with the future
    known, nothing hits more often); among those never used again the least
    recently used. An entry needed no later than the incoming one stays: making room
    for a far prefetch at its cost would only move the miss forward. The only copy
    of something stays always.

    Args:
        incoming: steps until the entry that wants room is used; 0 if it is waited for.
    """
    uses = [(next_use(e.name), e) for e in entries if not e.sole]
    may_go = [(use, e) for use, e in uses if use == math.inf or use > incoming]
    may_go.sort(key=lambda pair: (-pair[0], pair[1].used_ns, pair[1].name))
    return [e for _, e in may_go]


class UsePlan:
    """The next uses of entries, from the sequence in which they will be read.

    For a node, that is the merged sequence of all its ranks: orders are pure
    functions, so that each rank knows it without asking. Not thread-safe but for
    reading: `advance` is called by the one thread that reads on.

    Args:
        uses: entry names in the order of their use.
    """

    def __init__(self, uses: Sequence[str]) -> None:
        self._positions: dict[str, list[int]] = {}
        for position, name in enumerate(uses):
            self._positions.setdefault(name, []).append(position)
        self._now = 0

    def advance(self, position: int) -> None:
        """Everything before `position` has been used."""
        self._now = position

    def next_use(self, name: str) -> float:
        """Steps from now to the next use of an entry, ``math.inf`` if there is none."""
        positions = self._positions.get(name, ())
        at = bisect_left(positions, self._now)
        return positions[at] - self._now if at < len(positions) else math.inf
