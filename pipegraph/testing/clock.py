"""A clock that a test moves."""

from __future__ import annotations

import threading

from pipegraph.contracts import Clock


class ManualClock(Clock):
    """Stands still until :meth:`advance`.

    >>> clock = ManualClock()
    >>> clock.advance(1.5)
    >>> clock.now_ns()
    1500000000
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._lock = threading.Lock()
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Nanoseconds since the clock's start."""
        with self._lock:
            return self._now_ns

    def advance(self, seconds: float) -> None:
        """Move on; raises ValueError for a step back."""
        if seconds < 0:
            raise ValueError(f"time only grows, got {seconds} seconds")
        with self._lock:
            self._now_ns += round(seconds * 1e9)
