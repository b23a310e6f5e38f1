"""The counters of stages, and their sums over workers, the sidecar and passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

Totals = Counter[tuple[Any, ...]]
"""Numbers by name and place: ``("items", stage)``, ``("get", consumer, index)`` for the queue into an input. The
training loop is the stage ``""``."""

COUNTERS: Mapping[str, Callable[[list[int]], int]] = dict.fromkeys(
    "busy_ns calls wakes late_ns items samples nbytes failed retried dropped".split(), sum
)
"""The counters of one worker, attributes of its ``Meter``, with the function that merges those of several: nanoseconds
of work, calls, times that its thread resumed after a wait and nanoseconds from its being woken to that, and those that
``StageProfile`` has fields for. A ``max`` has no growth: an interval has that of the whole life."""


def merge(first: Totals, second: Totals) -> Totals:
    """Both together."""
    keys = {**first, **second}
    return Counter({key: COUNTERS.get(key[0], sum)([first[key], second[key]]) for key in keys})


def growth(now: Totals, earlier: Totals) -> Totals:
    """What was counted since an earlier look."""
    return Counter(
        {key: n if COUNTERS.get(key[0]) is max else max(0, n - earlier[key]) for key, n in now.items()}
    )
