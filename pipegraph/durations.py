"""Duration statistics: percentiles in constant memory, mergeable across workers.

The sketch is DDSketch (Masson, Rim and Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", VLDB 2019), from the ``ddsketch`` package.
"""

from __future__ import annotations

from math import log

import numpy as np

from pipegraph import concurrency

ACCURACY = 0.01
"""Relative error of a percentile."""

BATCH = 2048
"""Durations that are counted at once: one by one they would cost ten times as much."""


class Durations:
    """A sketch of any number of durations. Not thread-safe: a :class:`Stopwatch` gives a copy of its own.

    >>> took = Durations()
    >>> took.add_all([2_000_000] * 99 + [50_000_000])
    >>> took.count, round(took.quantile_s(0.5), 4), round(took.quantile_s(1.0), 3)
    (100, 0.002, 0.05)
    """

    __slots__ = ("_mapping", "_sketch", "_store")

    def __init__(self) -> None:
        # Imported here: `import pipegraph` needs no sketch.
        from ddsketch.ddsketch import BaseDDSketch
        from ddsketch.mapping import LogarithmicMapping
        from ddsketch.store import DenseStore

        self._mapping = LogarithmicMapping(ACCURACY)
        self._store = DenseStore()
        self._sketch = BaseDDSketch(self._mapping, self._store, DenseStore(), 0.0)

    @property
    def count(self) -> int:
        """How many durations."""
        return int(self._sketch.count)

    def add(self, ns: int, times: int = 1) -> None:
        """Count a duration in nanoseconds."""
        self._sketch.add(max(1, ns), times)

    def add_all(self, durations_ns: list[int]) -> None:
        """Count many durations in nanoseconds."""
        logs = np.log(np.maximum(durations_ns, 1.0)) / log(self._mapping.gamma)
        keys, times = np.unique(np.ceil(logs).astype(np.int64), return_counts=True)
        for key, count in zip(keys.tolist(), times.tolist(), strict=True):
            self._sketch.add(self._mapping.value(key), count)

    def merge(self, other: Durations) -> None:
        """Count those of another too."""
        self._sketch.merge(other._sketch)

    def quantile_s(self, quantile: float) -> float:
        """The duration in seconds below which this share 0..1 of all lies; 0.0 where there is none."""
        found = self._sketch.get_quantile_value(quantile)
        return 0.0 if found is None else float(found) / 1e9

    def since(self, earlier: Durations) -> Durations:
        """Those that an earlier copy of the same one did not hold."""
        before, made = earlier._counts(), Durations()
        for key, count in self._counts().items():
            more = count - before.get(key, 0)
            if more > 0:
                made._sketch.add(self._mapping.value(key), more)
        return made

    def _counts(self) -> dict[int, int]:
        store = self._store
        return {store.offset + at: round(count) for at, count in enumerate(store.bins) if count}


class Stopwatch:
    """Durations of one thread's work, counted by that thread and copied by any."""

    __slots__ = ("_counted", "_lock", "_none", "_none_counted", "noted")

    def __init__(self) -> None:
        self._lock = concurrency.RLock()  # a signal handler may ask inside
        self._counted: Durations | None = None
        self._none = self._none_counted = 0
        self.noted: list[int] = []
        """The thread appends nanoseconds, and calls :meth:`count` when there are :data:`BATCH` of them."""

    def note_none(self, times: int) -> None:
        """Record a number of durations of zero."""
        self._none += times

    def count(self) -> None:
        """Count what was noted."""
        with self._lock:
            noted = self.noted[:]
            del self.noted[: len(noted)]  # the thread may have noted more since
            if self._counted is None:
                self._counted = Durations()
            if noted:
                self._counted.add_all(noted)
            none = self._none - self._none_counted  # the thread may note more meanwhile
            if none:
                self._counted.add(0, none)
                self._none_counted += none

    def durations(self) -> Durations:
        """A copy of what was counted so far."""
        with self._lock:
            self.count()
            made = Durations()
            assert self._counted is not None
            made.merge(self._counted)
            return made
