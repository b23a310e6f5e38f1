"""Limits how far sources read ahead: to the last epoch that a pass has requested, or will request."""

from __future__ import annotations

from pipegraph import concurrency
from pipegraph.engine.activity import Activity, Cancelled, Waiter


class Horizon:
    """The last epoch that may be read; sources block before any later one.

    Args:
        limit: for sources that read ahead: the last epoch of which the loader knows that it will be requested.
        begun: for the others: the last epoch whose pass has begun.
    """

    def __init__(self, activity: Activity, limit: float, begun: float) -> None:
        self._activity = activity
        self._lock = concurrency.Lock()
        self._limit = limit
        self._begun = min(begun, limit)
        self._waiting: list[Waiter] = []
        self._cancelled = False

    @property
    def limit(self) -> float:
        """The last epoch that may be read."""
        return self._limit

    @property
    def begun(self) -> float:
        """The last epoch whose pass has begun."""
        return self._begun

    def wait_for(self, epoch: int, ahead: bool) -> None:
        """Blocks until ``epoch`` may be read; by a source that reads ``ahead``, before its pass begins.

        Raises:
            Cancelled: the run is over.
        """
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if epoch <= (self._limit if ahead else self._begun):
                    return
                waiter = Waiter(0)
                self._waiting.append(waiter)
            waiter.wait(self._activity)

    def raise_to(self, limit: float, begun: float) -> None:
        """Let sources read up to ``limit``, and those that do not read ahead up to ``begun``."""
        with self._lock:
            self._limit, self._begun = max(limit, self._limit), max(begun, self._begun)
            self._wake()  # also those that an interrupted call has left waiting

    def cancel(self) -> None:
        """Wake every waiter with ``Cancelled``."""
        with self._lock:
            self._cancelled = True
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            waiter.wake(self._activity)
        self._waiting.clear()
