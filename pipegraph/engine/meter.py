"""The counters of one worker, and the clocks of its thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

from pipegraph import concurrency
from pipegraph.counts import COUNTERS
from pipegraph.durations import BATCH, Stopwatch
from pipegraph.engine.activity import count_wakes
from pipegraph.engine.tracing import Tracer
from pipegraph.machine import scheduled

T = TypeVar("T")


class Meter:
    """The counters of one worker, which alone writes them; what other threads read may be one item behind.

    Attributes:
        began_ns: when the piece of work that is under way began; 0 while there is none.
    """

    __slots__ = (
        *COUNTERS,
        *"began_ns watch _clock _coreless_ns _cpu_ns _noted _stage _thread _tracer".split(),
    )

    if TYPE_CHECKING:  # an attribute for each of ``COUNTERS``

        def __getattr__(self, name: str) -> int: ...
        def __setattr__(self, name: str, value: object) -> None: ...

    def __init__(self, stage: str = "", tracer: Tracer | None = None) -> None:
        self._stage = stage
        self._tracer: Tracer = tracer or Tracer()
        self._clock: int | None = None  # the thread's CPU clock, read only on request: items pay nothing
        self._thread = 0  # the system's thread id, to ask the scheduler for time spent without a core
        self._cpu_ns = self._coreless_ns = 0
        self.began_ns = 0
        self.watch = Stopwatch()
        self._noted = self.watch.noted
        for name in COUNTERS:
            setattr(self, name, 0)

    def timed(self, call: Callable[..., T], *args: object) -> T:
        """Call and count a piece of work: the one place in which a worker's clock starts."""
        began_ns = self.began_ns = perf_counter_ns()
        made = call(*args)
        took = perf_counter_ns() - began_ns
        noted = self._noted
        noted.append(took)
        self.began_ns = 0  # first: read in between, it is not counted yet rather than twice
        self.busy_ns += took
        if self._tracer.on:
            self._tracer.worked(self._stage, took)
        if len(noted) >= BATCH:
            self.watch.count()
        try:
            return made
        finally:
            del made  # an error in it refers to this frame

    def in_work_ns(self, now_ns: int) -> int:
        """How long the piece of work that is under way has taken so far; it is not counted yet."""
        began, busy = self.began_ns, self.busy_ns
        if began != self.began_ns or busy != self.busy_ns:
            return 0  # it has just ended
        return max(0, now_ns - began) if began else 0

    def thread_begins(self) -> None:
        """Called by the worker's thread at its start. Inline stages have no thread, and some systems no such clocks.

        A meter may serve several threads, one after the other.
        """
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(concurrency.get_ident())
        self._thread = concurrency.get_native_id()
        count_wakes(self)

    def thread_ends(self) -> None:
        """Called by the worker's thread before it ends, and its clock with it."""
        ran, waited = self.cpu_ns(), self.coreless_ns()
        self._clock, self._thread = None, 0
        self._cpu_ns, self._coreless_ns = ran, waited

    def cpu_ns(self) -> int:
        """How long the thread has run on a core so far; 0 if not known."""
        clock = self._clock
        if clock is not None:
            try:
                return self._cpu_ns + time.clock_gettime_ns(clock)
            except OSError:  # the thread has just ended, or belongs to the process that forked this one
                pass
        return self._cpu_ns

    def coreless_ns(self) -> int:
        """How long the thread has been ready to run without a core so far; 0 if not known."""
        thread = self._thread
        found = scheduled(thread=thread) if thread else None
        return self._coreless_ns if found is None else self._coreless_ns + found[1]
