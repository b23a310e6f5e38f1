"""Who runs and who waits: how a pipeline notices that it stands still.

Invariant (under ``_lock``): ``_running`` is never less than the number of attached threads that
can still change something. A thread counts itself out *after* it has queued itself as a waiter,
and whoever wakes it counts it in *before* the wake; so a zero means that every attached thread
waits and no wake is on its way. Then ``on_idle`` is called, once, by the thread that made the zero.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancelled(BaseException):
    """The run is over: unwind. Never reaches users."""


class Activity:
    """Counts the threads of one run that do not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self.on_idle: Callable[[], None] = lambda: None

    def attach(self, threads: int = 1) -> None:
        """More threads take part; they run now."""
        with self._lock:
            self._running += threads

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


class Waiter:
    """One thread's one wait: a lock that its waker releases.

    Attributes:
        lane: where in a channel's order the waiting item stands.
        nbytes: what it needs room for; None for a thread that waits for its turn and not for room.
    """

    __slots__ = ("lane", "lock", "nbytes", "since_ns")

    def __init__(self, since_ns: int, lane: int = -1, nbytes: int | None = None) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.since_ns = since_ns
        self.lane = lane
        self.nbytes = nbytes

    def wait(self, activity: Activity) -> None:
        """Blocks until woken. Interruptible in the main thread."""
        activity.pause()
        self.lock.acquire()

    def wake(self, activity: Activity) -> None:
        """Called once, by whoever took this waiter out of its queue."""
        activity.resume()
        self.lock.release()
