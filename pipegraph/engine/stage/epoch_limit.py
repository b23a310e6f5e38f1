"""Limits how far sources read ahead: to the last epoch that a pass has requested or will request."""

from __future__ import annotations

from pipegraph import concurrency
from pipegraph.engine.activity import Activity, Cancelled, Waiter


class Horizon:
    """The last epoch that may be read; sources block before any later one."""

    def __init__(self, activity: Activity, limit: float) -> None:
        self._activity = activity
        self._lock = concurrency.Lock()
        self._limit = limit
        self._waiting: list[Waiter] = []
        self._cancelled = False

    @property
    def limit(self) -> float:
        """The last epoch that may be read."""
        return self._limit

    def wait_for(self, epoch: int) -> None:
        """Blocks until ``epoch`` may be read.

        Raises:
            Cancelled: the run is over.
        """
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if epoch <= self._limit:
                    return
                waiter = Waiter(0)
                self._waiting.append(waiter)
            waiter.wait(self._activity)

    def raise_to(self, epoch: float) -> None:
        """Let sources read up to ``epoch``."""
        with self._lock:
            if epoch > self._limit:
                self._limit = epoch
                self._wake()

    def cancel(self) -> None:
        """Wake every waiter with ``Cancelled``."""
        with self._lock:
            self._cancelled = True
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            waiter.wake(self._activity)
        self._waiting.clear()
