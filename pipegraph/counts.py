"""What is counted while a loader runs, before anybody asks what it means (``measurements``)."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

Totals = Counter[tuple[Any, ...]]
"""Numbers by name and place: ``("items", stage)``, ``("get", consumer, index)`` for the queue into an input. The
training loop is the stage ``""``."""

COUNTERS = tuple("busy_ns calls wakes late_ns items samples nbytes failed retried dropped".split())
"""The counters of one worker, attributes of its ``Meter``: nanoseconds of work, calls, times that its thread resumed
after a wait and nanoseconds from its being woken to that, and those that ``StageProfile`` has fields for."""

Edge = tuple[str, int]
"""The queue into input ``index`` of a stage; ``("", 0)`` is read by the training loop."""


class QueueLook(NamedTuple):
    """One queue at one moment; ``gained``: by how many items it is longer than when counting began."""

    capacity: int
    depth: int
    nbytes: int
    gained: int


def growth(now: Totals, earlier: Totals) -> Totals:
    """What was counted since an earlier look."""
    return Counter({key: max(0, n - earlier[key]) for key, n in now.items()})
