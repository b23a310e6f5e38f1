"""Figures over time, in bounded memory: the longer the run, the coarser the moments. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .values import Profile

MAX_MOMENTS = 720
"""Moments that are kept: as many as a chart has room for."""


@dataclass(frozen=True)
class Moment:
    """An interval of a run.

    Attributes:
        start_s, end_s: since recording began.
        samples, stall_s: delivered, and waited for by training, in it.
        depths: items in each queue at its end, in the order of ``Profile.channels``.
    """

    start_s: float
    end_s: float
    samples: int
    stall_s: float
    depths: tuple[float, ...]

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(1e-9, self.end_s - self.start_s)

    def with_next(self, later: Moment) -> Moment:
        """Both as one; depths are averaged over time."""
        first, second = self.end_s - self.start_s, later.end_s - later.start_s
        depths = later.depths
        if len(self.depths) == len(later.depths):
            weighted = zip(self.depths, later.depths, strict=True)
            depths = tuple((a * first + b * second) / max(1e-9, first + second) for a, b in weighted)
        samples, stall_s = self.samples + later.samples, self.stall_s + later.stall_s
        return Moment(self.start_s, later.end_s, samples, stall_s, depths)


def moment(interval: Profile, start_s: float, end_s: float) -> Moment:
    """An interval's profile as a moment."""
    depths = tuple(float(channel.depth) for channel in interval.channels)
    return Moment(start_s, end_s, interval.samples, interval.stall_s, depths)


def append(moments: list[Moment], latest: Moment) -> None:
    """Add the next moment; when there are too many, the two neighbours that are shortest become one."""
    moments.append(latest)
    if len(moments) > MAX_MOMENTS:
        at = min(range(MAX_MOMENTS), key=lambda index: moments[index + 1].end_s - moments[index].start_s)
        moments[at : at + 2] = [moments[at].with_next(moments[at + 1])]
