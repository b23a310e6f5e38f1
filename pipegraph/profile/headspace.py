"""Training speed with a loader that never waits: the most that any tuning can gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from time import perf_counter
from typing import Any

from pipegraph.errors import DataError, GraphError, shown
from pipegraph.integers import integer


@dataclass(frozen=True)
class Headspace:
    """What replaying batches has shown.

    Attributes:
        step_s: seconds per step as the loader feeds it.
        replayed_step_s: seconds per step on batches that are there already.
        steps: how many of each kind were timed.
    """

    step_s: float
    replayed_step_s: float
    steps: int

    @property
    def gain(self) -> float:
        """By how much faster training would be with an infinitely fast loader, 0.5 being half as fast again."""
        return max(0.0, self.step_s / self.replayed_step_s - 1) if self.replayed_step_s else 0.0

    def __str__(self) -> str:
        faster = f"{100 * self.gain:.0f} % faster" if self.gain < 9 else f"{1 + self.gain:,.0f} times as fast"
        return (
            f"a step takes {1e3 * self.step_s:.1f} ms, and {1e3 * self.replayed_step_s:.1f} ms on batches that are "
            f"there already: no loader could make training more than {faster}"
        )


def measure_headspace(loader: Any, step: Callable[[Any], Any], keep: int, steps: int) -> Headspace:
    """Time ``step`` on fresh batches of a loader, then, with it closed, on kept ones.

    Args:
        keep: batches to replay, after as many steps that are not timed.
    """
    if not callable(step):
        raise GraphError(f"headspace: step must be a function of one batch, got {shown(step)}")
    keep, steps = integer(keep, "headspace: batches"), integer(steps, "headspace: steps")
    with loader:
        batches = _endless(loader)
        kept = list(islice(batches, keep))
        if not kept:
            raise DataError("headspace: the loader delivered nothing")
        for batch in kept:
            step(batch)
        fed, count = _timed(islice(batches, steps), step)
        if not count:
            raise DataError(
                f"headspace: the loader delivered no more than {len(kept)} batches: give fewer batches="
            )
    replayed, _ = _timed(islice(chain.from_iterable(cycle([kept])), count), step)
    return Headspace(fed / count, replayed / count, count)


def _endless(loader: Any) -> Iterator[Any]:
    more = True
    while more:
        more = False
        for batch in loader:
            more = True
            yield batch


def _timed(batches: Iterator[Any], step: Callable[[Any], Any]) -> tuple[float, int]:
    started, count = perf_counter(), 0
    for batch in batches:
        step(batch)
        count += 1
    return perf_counter() - started, count
