"""Who runs and who waits: how a pipeline notices that it is stalled.

Invariant (under ``_lock``): ``_running`` is never less than the number of attached threads that
can still change something. A thread counts itself out *after* it has queued itself as a waiter,
and whoever wakes it counts it in *before* the wake; so a zero means that every attached thread
waits and no wake is on its way. Then ``on_idle`` is called, once, by the thread that made the zero.

Threads may attach at any moment, also right after a zero, change what ``on_idle`` is looking at and make another zero.
So what ``on_idle`` finds holds only if ``stillness`` is the same before and after it has looked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipegraph.engine.stage.stage_run import Meter


_own = threading.local()


def count_wakes(counts: Meter) -> None:
    """From now on the calling thread counts there how often it has resumed after a wait, and how long after it was
    woken: for want of a core, or of the interpreter lock."""
    _own.counts = counts


class Cancelled(BaseException):
    """The run is over: unwind. Never reaches users."""


class Leaving(BaseException):
    """The worker leaves its stage, with nothing in work. Never reaches users."""


class Activity:
    """Counts the threads of one run that do not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._started = 0  # threads that were attached or woken so far
        self.on_idle: Callable[[], None] = lambda: None

    def attach(self, threads: int = 1) -> None:
        """More threads take part; they run now."""
        with self._lock:
            self._running += threads
            self._started += threads

    def stillness(self) -> int | None:
        """A number that is the same as long as every attached thread waits; None while one runs."""
        with self._lock:
            return None if self._running else self._started

    def pause(self) -> None:
        """The calling thread is about to wait (or leaves); it is queued where its waker will find it."""
        with self._lock:
            self._running -= 1
            idle = self._running == 0
        if idle:
            self.on_idle()

    def resume(self) -> None:
        """A waiting thread is about to be woken by the caller."""
        with self._lock:
            self._running += 1
            self._started += 1


class Waiter:
    """One thread's one wait: a lock that its waker releases."""

    __slots__ = ("lock", "since_ns", "woken_ns")

    def __init__(self, since_ns: int) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.since_ns = self.woken_ns = since_ns

    def wait(self, activity: Activity) -> None:
        """Blocks until woken. Interruptible in the main thread."""
        activity.pause()
        self.lock.acquire()
        counts = getattr(_own, "counts", None)
        if counts is not None:
            counts.wakes += 1
            counts.late_ns += perf_counter_ns() - self.woken_ns

    def wake(self, activity: Activity) -> None:
        """Called once, by whoever took this waiter out of its queue."""
        activity.resume()
        self.woken_ns = perf_counter_ns()
        self.lock.release()
