"""Figures over time, in bounded memory: the longer the run, the coarser the moments. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from .values import Profile

MAX_MOMENTS = 720
"""Moments that are kept: as many as a chart has room for."""


@dataclass(frozen=True)
class Moment:
    """An interval of a run.

    Attributes:
        start_s, end_s: since recording began.
        items, samples: delivered in it.
        stall_s: that training waited in it.
        depths: items in each queue at its end, in the order of ``Profile.channels``.
        workers: per stage, at its end.
    """

    start_s: float
    end_s: float
    items: int
    samples: int
    stall_s: float
    depths: tuple[float, ...]
    workers: tuple[int, ...]

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(1e-9, self.end_s - self.start_s)

    def with_next(self, later: Moment) -> Moment:
        """Both as one; depths are averaged over time."""
        first, second = self.end_s - self.start_s, later.end_s - later.start_s
        depths: tuple[float, ...] = later.depths
        if len(self.depths) == len(later.depths):
            depths = tuple(
                (a * first + b * second) / max(1e-9, first + second)
                for a, b in zip(self.depths, later.depths, strict=True)
            )
        return Moment(
            self.start_s,
            later.end_s,
            self.items + later.items,
            self.samples + later.samples,
            self.stall_s + later.stall_s,
            depths,
            later.workers,
        )


@dataclass
class Series:
    """Moments one after the other; when there are too many, each two become one."""

    moments: list[Moment] = field(default_factory=list)
    joined: int = 1
    _open: Moment | None = None
    _inside: int = 0

    def add(self, moment: Moment) -> None:
        """The next interval."""
        self._open = moment if self._open is None else self._open.with_next(moment)
        self._inside += 1
        if self._inside < self.joined:
            return
        self.moments.append(self._open)
        self._open, self._inside = None, 0
        if len(self.moments) >= MAX_MOMENTS:
            halves = zip(self.moments[::2], self.moments[1::2], strict=True)
            self.moments = [first.with_next(second) for first, second in halves]
            self.joined *= 2

    def all(self) -> list[Moment]:
        """The moments so far, the last one perhaps shorter than the others."""
        return self.moments if self._open is None else [*self.moments, self._open]


def moment(interval: Profile, start_s: float, end_s: float) -> Moment:
    """An interval's profile as a moment."""
    return Moment(
        start_s,
        end_s,
        interval.items,
        interval.samples,
        interval.stall_s,
        tuple(float(channel.depth) for channel in interval.channels),
        tuple(stage.workers for stage in interval.stages.values() if stage.workers),
    )
