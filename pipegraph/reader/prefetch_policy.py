"""When to start loading the next block or part: driven by time, not by a count. Pure.

A trainer that works on one part needs the next one at its end, and not before:
starting earlier only holds memory. So a part is started as soon as the time until
it is needed is no more than its lead: the 95th percentile of load times, plus a
margin. With T_load above T_train this keeps ceil(T_load / T_train) parts and more
on their way at once, as far as there are bytes for them.

Nothing here waits or reads a clock: the caller asks after each event (a part was
finished, a load ended, samples were consumed), and does what the answer says.
"""

from __future__ import annotations

import math
from collections import deque

# Of ``memory_limit``, what blocks held in memory may take; chunks in flight have the rest.
SHARE = 0.5

# The margin: a tenth of the 95th percentile, and three times its distance from the mean.
# A load that comes late stops every rank of a collective, and of a thousand ranks one is
# nearly always beyond its 95th percentile; one that comes early holds a little memory a
# little longer. benchmarks/idle_ratio.py shows what the margins do.
MARGIN = 0.1
SPREADS = 3.0

# Recent enough to follow storage that gets slower, many enough for a 95th percentile.
REMEMBERED = 64

# With fewer measurements than this a percentile says little.
MIN_MEASUREMENTS = 8

# Sooner than this is now: a caller that asks again when a part is due must not be answered
# for the rounding of its clock, to ask again at the same time.
NOW_S = 1e-3


class RecentDurations:
    """The last durations of one kind, in seconds. One thread at a time."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._latest: deque[float] = deque(maxlen=remembered)

    def add(self, seconds: float) -> None:
        """Take another measurement, >= 0."""
        self._latest.append(seconds)

    @property
    def mean(self) -> float | None:
        """The mean; None before the first measurement."""
        return math.fsum(self._latest) / len(self._latest) if self._latest else None

    @property
    def trimmed_mean(self) -> float | None:
        """The mean without the longest twentieth; None before the first measurement."""
        kept = sorted(self._latest)[: len(self._latest) - len(self._latest) // 20]
        return math.fsum(kept) / len(kept) if kept else None

    @property
    def p95(self) -> float | None:
        """The smallest one that 95 % do not exceed (of fewer than 20, the largest); None without any."""
        if not self._latest:
            return None
        return sorted(self._latest)[math.ceil(0.95 * len(self._latest)) - 1]

    @property
    def lead(self) -> float | None:
        """How long before it is needed to start what takes so long; None while there are few measurements."""
        mean, p95 = self.mean, self.p95
        if mean is None or p95 is None or len(self._latest) < MIN_MEASUREMENTS:
            return None
        # One load far above the rest (the first ones wait for each other) lifts the mean above the percentile.
        return p95 * (1 + MARGIN) + SPREADS * max(0.0, p95 - mean)


def start_in(
    until_s: float | None, lead_s: float | None, ahead: int, nbytes: int, free_bytes: int
) -> float | None:
    """Seconds after which to start loading the next part, 0 for now; None where that does not depend on time.

    Args:
        until_s: until it is needed; None before the first measurement of the pace.
        lead_s: ``RecentDurations.lead`` of load times, from start to end; None while few are known.
        ahead: parts after the one in use that are loading or loaded already.
    """
    if until_s is None or lead_s is None:
        # One part ahead is always needed, more may not be.
        return None if ahead or nbytes > free_bytes else 0.0
    if until_s - lead_s > NOW_S:
        return until_s - lead_s
    return 0.0 if nbytes <= free_bytes else None
