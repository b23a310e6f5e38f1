"""How long the reader waited at each block transition."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any, Final

from pipegraph import concurrency
from pipegraph.durations import Durations
from pipegraph.measured import Report
from pipegraph.units import format_share

WORST: Final = 8
"""Transitions that are kept one by one: those with the longest waits."""


class LateBlocks(Report):
    """How late each block of one stage came since its loader was made, in bounded memory. Thread-safe.

    Blocks of a cold start (the first of a run, which cannot be fetched ahead) are counted apart.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._lock = concurrency.Lock()
        self._counts = Counter[str]()
        self._standing_s = self._elapsed_s = 0.0
        self._from: tuple[float, float] | None = None
        self._waits = Durations()
        self._worst: list[tuple[int, int, dict[str, Any]]] = []

    def begin(self, now: float) -> None:
        """The stage begins to read: times count from here. Called once, before anything else."""
        self._began = now

    def new_run(self) -> None:
        """The time up to the next transition does not count."""
        with self._lock:
            self._from = None

    def entered(
        self,
        name: str,
        epoch: int,
        step: int,
        wanted: float | None,
        there: float,
        now: float,
        standing: float,
        cold_start: bool,
    ) -> None:
        """A block is used for the first time since it was loaded, for this step of this rank (-1 where that is not
        known).

        Args:
            wanted, there: when a worker first found it missing, if one did, and when it was ready.
            standing: seconds in which at least one worker waited, since the stage began to read.
        """
        us = 0 if wanted is None else max(0, round((there - wanted) * 1e6))
        with self._lock:
            before, stood = self._from or (now, standing)
            self._from = now, standing
            if cold_start:
                self._counts.update(cold_start=1, cold_start_waited_us=us)
                return
            self._elapsed_s += max(0.0, now - before)
            self._standing_s += max(0.0, standing - stood)
            self._waits.add(1_000 * us)
            self._counts.update(entered=1, late=us > 0, waited_us=us)
            if us and wanted is not None:
                found = {"waited_us": us, "name": name, "epoch": epoch, "step": step}
                found |= {"wanted_s": wanted - self._began, "there_s": there - self._began}
                entry = (us, self._counts["late"], found)
                self._worst = heapq.nlargest(WORST, [*self._worst, entry])

    def to_dict(self) -> dict[str, Any]:
        """The counts and waits, as plain numbers.

        ``entered`` and ``late`` count transitions, ``waited_us`` sums their waits, ``starved`` is the share of the time
        that some worker waited; percentiles are of the waits of all transitions; the ``worst`` ones are listed
        one by one, longest first. The blocks of cold starts count apart.
        """
        with self._lock:
            names = ("entered", "late", "waited_us", "cold_start", "cold_start_waited_us")
            return {
                **{name: self._counts[name] for name in names},
                "starved": self._standing_s / self._elapsed_s if self._elapsed_s else 0.0,
                **{f"p{p}_us": round(1e6 * self._waits.quantile_s(p / 100)) for p in (50, 95, 99)},
                "worst": [found for _, _, found in self._worst],
            }

    def lines(self) -> list[str]:
        report = self.to_dict()
        if not report["entered"]:
            return []
        share = format_share(report["starved"])
        late = f"blocks late: {report['late']:,} of {report['entered']:,}, {share} of the time"
        if report["late"]:
            late += f", waits p95 {_time(report['p95_us'])}, p99 {_time(report['p99_us'])}"
        return [late] + [
            f"  late by {_time(found['waited_us'])}: {found['name']}, epoch {found['epoch']}, step {found['step']:,}"
            for found in report["worst"][:3]
        ]


class Standing:
    """Time during which at least one worker waits. The caller holds a lock."""

    def __init__(self) -> None:
        self._waiting = 0
        self._since = self._total = 0.0

    def begin(self, now: float) -> None:
        """A worker begins to wait."""
        if not self._waiting:
            self._since = now
        self._waiting += 1

    def end(self, now: float) -> float | None:
        """A worker stops waiting; for the last of several at once, the seconds since the first began."""
        self._waiting -= 1
        if self._waiting:
            return None
        self._total += now - self._since
        return now - self._since

    def total(self, now: float) -> float:
        """Seconds in all, those under way included."""
        return self._total + (now - self._since if self._waiting else 0.0)


def _time(us: int) -> str:
    return f"{us / 1e6:.3g} s" if us >= 1e6 else f"{us / 1e3:.3g} ms"
