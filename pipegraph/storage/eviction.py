"""Which cache entry goes first: pure functions over facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NextUse = Callable[[str], float]
"""Steps until an entry is used next; ``math.inf`` if never or unknown."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One file in a cache folder, as found there; ``used_ns``: when it was opened last, by the wall clock."""

    name: str
    nbytes: int
    used_ns: int


def eviction_order(
    entries: Iterable[CacheEntry], next_use: NextUse, incoming: float = 0.0
) -> list[CacheEntry]:
    """The entries that may go, first to go first.

    The one whose next use lies farthest ahead (Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966), among those never used again the least recently used. One needed no later than the incoming entry
    (0 if that is waited for) stays: making room for a far prefetch at its cost would only move the miss forward.
    """
    uses = [(next_use(e.name), e) for e in entries]
    may_go = [(use, e) for use, e in uses if use == math.inf or use > incoming]
    may_go.sort(key=lambda pair: (-pair[0], pair[1].used_ns, pair[1].name))
    return [e for _, e in may_go]
