"""When to retry and to hedge. Pure.

Times are seconds on any clock that only grows; callers pass them in.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter, inside a deadline.

    Full jitter (a delay drawn from zero to the bound) spreads the clients that one
    outage hit at once; see Brooker, "Exponential Backoff And Jitter", AWS, 2015.

    Args:
        deadline_s: after this no further try begins, for a transfer without bytes;
            each byte adds its time at `min_rate`.
        first_s, max_s: bound of the first and of any delay.
        min_rate: bytes per second.
    """

    deadline_s: float = 120.0
    first_s: float = 0.1
    max_s: float = 10.0
    min_rate: float = 64_000.0

    def delay(self, failures: int, elapsed_s: float, nbytes: int, draw: float) -> float | None:
        """Seconds to wait before the next try, or None to give up.

        Args:
            failures: so far, at least 1; those before the last progress do not count.
            draw: uniform in [0, 1).
        """
        bound = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 60))
        delay = draw * bound
        deadline = self.deadline_s + nbytes / self.min_rate
        return delay if elapsed_s + delay < deadline else None


class Hedge:
    """Decides when a second, equal request is worth its cost. Not thread-safe.

    As in Dean and Barroso, "The Tail at Scale", 2013: after the 95th percentile of what requests took; and of at most
    one in twenty, so that an overloaded store is not loaded further.
    """

    WINDOW: Final = 128
    NEEDED: Final = 16
    MAX_SHARE: Final = 0.05

    def __init__(self, min_s: float = 0.05) -> None:
        self._least = min_s
        self._took: deque[float] = deque(maxlen=self.WINDOW)
        self._requests = self._hedges = 0

    def finished(self, took_s: float) -> None:
        """A request was answered."""
        self._requests += 1
        self._took.append(took_s)

    def after(self) -> float | None:
        """Seconds after which to ask again, or None where that is not known or not allowed."""
        if len(self._took) < self.NEEDED or not self._is_allowed():
            return None
        ordered = sorted(self._took)
        return max(self._least, ordered[int(0.95 * len(ordered))])

    def take(self) -> bool:
        """Whether a second request may be sent now; it counts as sent.

        Asked when the time has come: of many requests that wait at the same moment most may not.
        """
        if not self._is_allowed():
            return False
        self._hedges += 1
        return True

    def _is_allowed(self) -> bool:
        return self._hedges < 1 + self.MAX_SHARE * self._requests


def jitter() -> float:
    """A draw for `Backoff.delay`, never seeded: ranks that fail together must not draw the same delays."""
    return random.SystemRandom().random()
