"""Counts running and waiting threads, to detect that a pipeline is stalled.

Invariant (under ``_lock``): ``_running`` is never less than the number of attached threads that
can still change something. A thread is subtracted *after* it has queued itself as a waiter, and
its waker adds it back *before* the wake; so zero means that every attached thread waits and no
wake is on its way. The thread that reaches zero then calls ``on_idle``, once.

Ctrl-C may interrupt the consumer between any two steps, also inside a critical section. It then cancels the run. So a
waiter leaves its queue *after* its wake, and may be woken twice: ``cancel`` finds each one that was not woken.

Threads may attach at any moment, even right after a zero, change what ``on_idle`` is reading and reach zero again. So
what ``on_idle`` has read is consistent only if ``stillness`` is the same before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol

from pipegraph import concurrency

_own = concurrency.local()


class WakeCounts(Protocol):
    """Of one thread: how often it resumed after a wait, and nanoseconds from being woken to that."""

    wakes: int
    late_ns: int


def count_wakes(counts: WakeCounts) -> None:
    """Let the calling thread count in ``counts`` how often it resumed after a wait, and how late after its wake-up:
    because it had no core, or not the GIL."""
    _own.counts = counts


class Cancelled(BaseException):
    """The run is over: unwind the worker's stack. Never reaches users."""


class Leaving(BaseException):
    """The worker leaves its stage, with no item in work. Never reaches users."""


class Activity:
    """The number of threads of one run that are not waiting."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._running = 0
        self._started = 0  # threads that were attached or woken so far
        self.on_idle: Callable[[], None] = lambda: None

    def attach(self, threads: int = 1) -> None:
        """Add threads to the run; they count as running."""
        with self._lock:
            self._running += threads
            self._started += threads

    def stillness(self) -> int | None:
        """A number that stays the same while every attached thread waits; None while one runs."""
        with self._lock:
            return None if self._running else self._started

    def pause(self) -> None:
        """Called by a thread that is about to wait, or leaves, after it has queued itself for its waker."""
        with self._lock:
            self._running -= 1
            idle = self._running == 0
        if idle:
            self.on_idle()

    def resume(self) -> None:
        """Called by a thread that is about to wake a waiting one."""
        with self._lock:
            self._running += 1
            self._started += 1


class Waiter:
    """One wait of one thread: a lock that its waker releases."""

    __slots__ = ("lock", "since_ns", "woken_ns")

    def __init__(self, since_ns: int) -> None:
        self.lock = concurrency.Lock()
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
        """Wake the thread; the caller then removes this waiter from its queue."""
        activity.resume()
        self.woken_ns = perf_counter_ns()
        try:
            self.lock.release()
        except RuntimeError:
            pass  # woken before, by a thread that was interrupted before the removal
