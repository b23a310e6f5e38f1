"""The counters of one worker, and the clocks of its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from pipegraph.durations import BATCH, Stopwatch
from pipegraph.engine.activity import count_wakes
from pipegraph.engine.tracing import Tracer
from pipegraph.machine import scheduled


class Meter:
    """One worker's counters. Written by that worker alone, read by anyone: a torn view is one item off."""

    __slots__ = (
        "_busy_ns _clock _cpu_ns _noted _stage _thread _tracer _waited_ns calls dropped failed items "
        "late_ns nbytes retried samples wakes watch"
    ).split()

    def __init__(self, stage: str = "", tracer: Tracer | None = None) -> None:
        self._stage = stage
        self._tracer = tracer or Tracer()
        self._clock: int | None = (
            None  # of its thread's time on a core, read by whoever asks: items pay nothing
        )
        self._cpu_ns = 0
        self._thread = 0  # its number in the system, whose scheduler knows how long it waited for a core
        self._waited_ns = 0
        self._busy_ns = 0
        self.watch = Stopwatch()
        self._noted = self.watch.noted
        self.calls = 0
        self.items = 0
        self.samples = 0
        self.nbytes = 0
        self.dropped = 0
        self.failed = 0
        self.retried = 0
        self.wakes = 0
        self.late_ns = 0

    @property
    def busy_ns(self) -> int:
        """Nanoseconds of work; what it grows by is how long one call took."""
        return self._busy_ns

    @busy_ns.setter
    def busy_ns(self, total: int) -> None:
        noted = self._noted
        took = total - self._busy_ns
        noted.append(took)
        self._busy_ns = total
        if self._tracer.on:
            self._tracer.worked(self._stage, took)
        if len(noted) >= BATCH:
            self.watch.count()

    def values(self) -> tuple[int, ...]:
        """All counters, as :meth:`of` takes them."""
        return (
            *(self.busy_ns, self.calls, self.items, self.samples, self.nbytes),
            *(self.dropped, self.failed, self.retried, self.cpu_ns(), self.waited_ns()),
            *(self.wakes, self.late_ns),
        )

    @staticmethod
    def of(values: Sequence[int]) -> Meter:
        """A meter that shows these."""
        meter = Meter()
        meter._busy_ns, meter.calls, meter.items, meter.samples, meter.nbytes = values[:5]
        meter.dropped, meter.failed, meter.retried, meter._cpu_ns, meter._waited_ns = values[5:10]
        meter.wakes, meter.late_ns = values[10:]
        return meter

    def thread_begins(self) -> None:
        """Called by the worker's own thread; an inline stage has none, nor have all systems such clocks.

        A meter may have several threads, one after the other.
        """
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.get_native_id()
        count_wakes(self)

    def thread_ends(self) -> None:
        """Called by the worker's own thread, whose clock ends with it."""
        ran, waited = self.cpu_ns(), self.waited_ns()
        self._clock, self._thread = None, 0
        self._cpu_ns, self._waited_ns = ran, waited

    def cpu_ns(self) -> int:
        """How long the thread has run on a core so far; 0 where that is not known."""
        clock = self._clock
        if clock is not None:
            try:
                return self._cpu_ns + time.clock_gettime_ns(clock)
            except OSError:  # the thread has just ended, or lives on in the process that forked this one
                pass
        return self._cpu_ns

    def waited_ns(self) -> int:
        """How long the thread has been ready to run and had no core so far; 0 where that is not known."""
        thread = self._thread
        found = scheduled(thread=thread) if thread else None
        return self._waited_ns if found is None else self._waited_ns + found[1]


class FirstMeter(Meter):
    """Of the first stage of a run: what its worker waits for the others is counted with them."""

    __slots__ = ("_run",)

    def __init__(self, stage: str, tracer: Tracer, run: Any) -> None:
        super().__init__(stage, tracer)
        self._run = run

    @property
    def busy_ns(self) -> int:
        """Without the others' time."""
        return self._busy_ns

    @busy_ns.setter
    def busy_ns(self, total: int) -> None:
        others, self._run.others_ns = self._run.others_ns, 0
        Meter.busy_ns.fset(self, max(self._busy_ns, total - others))  # type: ignore[attr-defined]
